"""Local copies of what lies in stores, in the cache: `$RECSPEC_CACHE`, by default `~/.cache/recspec/stores`.

CACHE/PLACE/COPY/NAME         the files of a copy; NAME is the last part of the URL
CACHE/PLACE/COPY/origin.json  the URL, and the size and version of each object; written last, so the copy is whole
CACHE/PLACE/COPY/uses/        a lock for each process that uses the copy

A copy never changes. Other content of the same URL makes another copy, which shares the unchanged files. A copy that no
process uses is removed once a newer one is there, or the disk is full.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from recspec.base.errors import DataError
from recspec.base.files import confined, read_json, removed, write_whole
from recspec.base.stores.store import STATE, Entry, Listing, Replaced, Store, Url, free_bytes, local_of, parse

ORIGIN, USES = "origin.json", "uses"
TRIES = 3
"""Times that a folder is read again after it changed meanwhile."""
UNFINISHED = f"{STATE}/unfinished.json"
"""Object in a folder that is being written: its content is not whole."""

_USED: list[FileLock] = []
"""The locks of the copies that this process uses, held until it ends."""


def cache() -> Path:
    """The folder of all copies."""
    chosen = os.environ.get("RECSPEC_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(home) / "recspec" / "stores"


def shown(text: object) -> str:
    """A text in which the paths of copies are the URLs that they stand for."""
    pattern = re.escape(str(cache())) + r"/([0-9a-f]{16})/([\w-]+)/([^/\s'\"]+)"

    def url(found: re.Match[str]) -> str:
        try:
            record = read_json(cache() / found[1] / "url.json", most=1 << 16)
        except DataError:
            return found[0]
        if not isinstance(record, dict) or "url" not in record:
            return found[0]
        url = str(record["url"])
        return url if found[3] == url.rpartition("/")[2] else f"{url.rpartition('/')[0]}/{found[3]}"

    return re.sub(pattern, url, str(text))


def fetched(url: Url | str, what: str = "the path") -> Path:
    """The local path of a URL: its own for `file://`, else of a whole and current copy of the folder or object.

    Raises:
        DataError: if nothing is there, a writer has not finished, names are dangerous, the disk has no room, or the
            store fails.
    """
    url = parse(url, what) if isinstance(url, str) else url
    return local_of(url) if url.scheme == "file" else copied(Store(url), what)


def copied(store: Store, what: str) -> Path:
    """A whole and current copy of what lies in a store."""
    for left in reversed(range(TRIES)):
        check_finished(store)
        listing = store.listing()
        if not listing:
            raise DataError(f"{what}: {store.url} holds nothing; check the name")
        try:
            if (found := _copy_of(store, listing)) is not None:
                return found
        except Replaced:
            if not left:
                raise
    raise DataError(f"{what}: {store.url} changed while it was read, {TRIES} times; wait until its writer has finished")


def check_finished(store: Store) -> None:
    """Refuse a folder that a writer has begun and not finished, or that lies in one."""
    parts = store.url.parts
    folders = [replace(store.url, parts=parts[:end]) for end in range(len(parts), -1, -1)]
    for folder, there in zip(folders, store.exists([each.below(UNFINISHED) for each in folders]), strict=True):
        if there:
            raise DataError(
                f"{folder}: its writer has not finished; wait for it, or repeat its command (train with --resume)"
            )


def place_of(url: Url) -> Path:
    """The folder of all copies of a URL."""
    told = f"{url} {os.environ.get('AWS_ENDPOINT_URL_S3') or os.environ.get('AWS_ENDPOINT_URL') or ''}"
    folder = cache() / hashlib.sha256(told.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / "url.json").exists():
        write_whole(folder / "url.json", json.dumps({"url": str(url)}))
    return folder


def _copy_of(store: Store, listing: Listing) -> Path | None:
    """A whole copy of these objects; None if they changed meanwhile, so that what was read may be of other ones."""
    place = place_of(store.url)
    with FileLock(place / "lock"):  # one process at a time makes or removes copies of a URL
        folder = next((each for each in _copies(place) if listing_of(each) == listing), None)
        if folder is None:
            folder = place / _digest(listing)
            _make(store, listing, folder, place)
            check_finished(store)
            if store.listing() != listing:
                removed(folder)
                return None
            objects = {name: [each.size, each.version] for name, each in listing.items()}
            write_whole(folder / ORIGIN, json.dumps({"url": str(store.url), "objects": objects}))
        hold(folder)
        for other in _copies(place):
            if other != folder:
                remove_unused(other)
        with suppress(OSError):
            os.utime(folder / ORIGIN)
        return folder / store.url.name


def _copies(place: Path) -> list[Path]:
    return sorted(each for each in place.iterdir() if each.is_dir())


def listing_of(folder: Path) -> Listing | None:
    """The objects that a whole copy holds; None for one that is not whole."""
    try:
        record = read_json(folder / ORIGIN)
    except DataError:
        return None
    objects = record.get("objects") if isinstance(record, dict) else None
    if not isinstance(objects, dict):
        return None
    return {name: Entry(int(size), str(version)) for name, (size, version) in objects.items()}


def _make(store: Store, listing: Listing, folder: Path, place: Path) -> None:
    """Fill the folder of a copy: unchanged files from other copies, what an earlier try wrote, the rest by reading."""
    own = folder / store.url.name
    others = [(each / store.url.name, listing_of(each) or {}) for each in _copies(place) if each != folder]
    missing: dict[str, Entry] = {}
    for name, entry in listing.items():
        target = own / name
        if target.is_file() and not target.is_symlink() and target.stat().st_size == entry.size:
            continue
        if entry.tag and _linked(others, name, entry, target):
            continue
        missing[name] = entry
    need = sum(each.size for each in missing.values())
    folder.mkdir(parents=True, exist_ok=True)
    if free_bytes(folder) < need:
        make_room(need, keep=folder)
    if (free := free_bytes(folder)) < need:
        raise DataError(
            f"{store.url}: takes {need:,} bytes, and the disk of {cache()} has {free:,}; name a larger RECSPEC_CACHE"
        )
    own.mkdir(exist_ok=True) if "" not in listing else None
    store.download(missing, folder, lambda name: own / name)


def _linked(others: list[tuple[Path, Listing]], name: str, entry: Entry, target: Path) -> bool:
    """Whether the same object lay in an older copy, whose file is now in this one too."""
    for files, listing in others:
        if listing.get(name) == entry:
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                os.link(files / name, target)
                return True
    return False


def _digest(listing: Mapping[str, Entry]) -> str:
    told = json.dumps([[name, each.size, each.version] for name, each in sorted(listing.items())])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


# --- copies in use ---------------------------------------------------------------------------------------------------


def hold(folder: Path) -> None:
    """Keep a copy from being removed until this process ends."""
    (folder / USES).mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / USES / f"{os.getpid()}-{secrets.token_hex(4)}")
    lock.acquire(blocking=False)
    _USED.append(lock)


def remove_unused(folder: Path) -> bool:
    """Remove a copy, unless a process uses it."""
    uses = folder / USES
    for file in sorted(uses.iterdir()) if uses.is_dir() else ():
        try:
            with FileLock(file, timeout=0):
                pass
        except Timeout:
            return False
    with suppress(OSError):
        (folder / ORIGIN).unlink(missing_ok=True)
    removed(folder)
    return True


def make_room(need: int, *, keep: Path) -> None:
    """Remove unused copies, those used longest ago first, until so many bytes are free."""
    copies = [each for place in cache().iterdir() if place.is_dir() for each in _copies(place) if each != keep]
    copies = [each for each in copies if (each / ORIGIN).is_file()]
    for folder in sorted(copies, key=lambda each: (each / ORIGIN).stat().st_mtime):
        if free_bytes(keep) >= need:
            return
        own = folder.parent == keep.parent  # whose lock is held
        with suppress(Timeout), nullcontext() if own else FileLock(folder.parent / "lock", timeout=0):
            remove_unused(folder)


# --- folders to change -----------------------------------------------------------------------------------------------


def work_folder(url: Url, token: str) -> Path:
    """An empty folder of this process, in which what will lie at a URL is made; returns the path of that."""
    folder = place_of(url) / f"work-{token}"
    folder.mkdir(exist_ok=True)
    hold(folder)
    return folder / url.name


def files_of(path: Path) -> dict[str, Path]:
    """The files of a folder by their relative names, or a file under the name ''; locks and links are left out."""
    if path.is_file():
        return {"": path}
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(each for each in folders if not _is_own_state(each))
        for file in (Path(folder, name) for name in sorted(names) if not _is_own_state(name)):
            if not file.is_symlink() and file.is_file():
                relative = file.relative_to(path).as_posix()
                confined(path, relative)
                found[relative] = file
    return found


def _is_own_state(name: str) -> bool:
    """Locks, temporary names and backups, which are of this machine."""
    return name == ".lock" or (name.startswith(".") and name.endswith((".lock", ".tmp")))


def clone(source: Path, target: Path, *, linked: bool) -> None:
    """Copy the files of a folder; `linked` shares their bytes, for a target whose files are replaced, never changed."""
    if source.is_file():
        shutil.copyfile(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for name, file in files_of(source).items():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if linked:
            with suppress(OSError):
                os.link(file, place)
                continue
        shutil.copyfile(file, place)
