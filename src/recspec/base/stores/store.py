"""A folder or a file in a store, by its URL, through `pyarrow.fs`: listed within bounds, read, written, deleted.

Credentials, regions and proxies are the store's own: environment variables, profiles and instance roles. They stand in
no message and no file of recspec.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from recspec.base.errors import DataError, MissingExtraError, of_the_machine
from recspec.base.files import PathError, confined, masked, temporary_name

if TYPE_CHECKING:
    from pyarrow import fs


SCHEMES = ("s3", "gs", "hdfs", "file")
MOST_NAME_BYTES, MOST_PART_BYTES = 1024, 255
"""Of a key, as S3 and GCS allow; of a part of it, as local file systems allow."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_SHORTENED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)(.*)", re.DOTALL)
"""What is left of a URL that was made a `Path`, which takes two slashes for one."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_HDFS_HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:[0-9]{1,5})?)?")


@dataclass(frozen=True)
class Url:
    """A place in a store: the parts of its key lie in the bucket or under the host."""

    scheme: str
    host: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join((self.host, *self.parts))}"

    @property
    def name(self) -> str:
        """Its last part, or the bucket."""
        return self.parts[-1] if self.parts else self.host or self.scheme

    @property
    def parent(self) -> Url:
        """The folder that it lies in."""
        return Url(self.scheme, self.host, self.parts[:-1])

    def below(self, name: str) -> Url:
        """The place of a relative name in it."""
        return Url(self.scheme, self.host, (*self.parts, *name.split("/")))


def url_text(value: object) -> str | None:
    """The URL that a text or a path spells; None for anything else, such as `C:\\x`, `a:b` and `./s3:/x`."""
    if not isinstance(value, (str, os.PathLike)):
        return None
    text = os.fspath(value)
    if not isinstance(text, str):
        return None
    if _URL.fullmatch(text):
        return text
    if isinstance(value, PurePath) and (found := _SHORTENED.fullmatch(text)):
        return f"{found[1]}:///{found[2]}" if found[1] == "file" else f"{found[1]}://{found[2]}"
    return None


def parse(text: str, what: str) -> Url:
    """The URL that a user typed as `what`.

    Raises PathError, which shows no secret, for an unknown scheme, a user or password, a query, and a name that could
    lead elsewhere.
    """
    found = _URL.fullmatch(text)
    where = f"{what}: '{masked(text)}'"
    if found is None:
        raise PathError(f"{where} is no URL; expected such as s3://BUCKET/KEY")
    scheme, rest = found[1].lower(), found[2]
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise PathError(f"{where} is a URL of the scheme '{scheme}'; supported: {known}")
    host, _, key = rest.partition("/")
    if "@" in host:
        raise PathError(
            f"{where} holds a user or a password; leave it out: the environment or a profile has the credentials"
        )
    if "?" in rest or "#" in rest:
        raise PathError(
            f"{where} holds '?' or '#'; expected a bucket and a key: settings, as AWS_ENDPOINT_URL, are variables"
        )
    if scheme == "file":
        if host not in ("", "localhost"):
            raise PathError(f"{where} names the host '{host}'; expected file:///PATH with three slashes")
        return Url(scheme, "", tuple(part for part in key.split("/") if part))
    if not (_HDFS_HOST if scheme == "hdfs" else _HOST).fullmatch(host):
        raise PathError(f"{where} has no valid {'host' if scheme == 'hdfs' else 'bucket'} after {scheme}://")
    key = key.rstrip("/")
    if key and (problem := name_problem(key)):
        raise PathError(f"{where}: its key {problem}")
    return Url(scheme, host, tuple(key.split("/")) if key else ())


def local_of(url: Url) -> Path:
    """The local path of a `file://` URL."""
    return Path("/", *url.parts)


def name_problem(name: str) -> str | None:
    """Why a key can't be the name of a local file below a folder; None if it can.

    Names with `..`, empty parts, backslashes, drive letters or control characters lead elsewhere somewhere.
    """
    if not name:
        return "is empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if len(encoded) > MOST_NAME_BYTES:
        return f"is longer than {MOST_NAME_BYTES:,} bytes"
    if not name.isprintable():
        return "holds characters that can't be printed"
    if "\\" in name:
        return "holds a backslash"
    if "?" in name or "#" in name:
        return "holds '?' or '#', which have a meaning in a URL"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"holds the part '{part}'; expected names between single slashes"
        if len(part.encode()) > MOST_PART_BYTES:
            return f"holds a part longer than {MOST_PART_BYTES} bytes"
    return None


STATE = ".recspec"
"""Folder of locks and marks in a store; never a part of a copy."""
MOST_OBJECTS = 100_000
BUFFER_BYTES = 8 << 20
AT_ONCE = 16
"""Objects asked for, read or written at once."""
MOST_TAGGED = 2_000
"""Objects whose entity tags are asked for; of more, only the sizes and times are compared."""
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


@dataclass(frozen=True)
class Entry:
    """An object of a listing; `version` changes with its content: the entity tag, where there is one, and the time."""

    size: int
    version: str

    @classmethod
    def of(cls, size: int, tag: str, mtime_ns: int | None) -> Entry:
        """An object with its entity tag, or '', and its time, which changes if earlier content is put back."""
        return cls(size, f"{tag} time {mtime_ns}".strip())

    @property
    def tag(self) -> str:
        """The entity tag; '' if the store has none."""
        return self.version.rpartition("time ")[0].strip()


Listing = Mapping[str, Entry]
"""Name below the folder -> object; `""` for a URL that is an object itself."""


class Store:
    """The place of a URL. Errors of the store are `DataError`, with the URL and without secrets."""

    def __init__(self, url: Url, filesystem: fs.FileSystem | None = None) -> None:
        self.url = url
        with self._errors("opened"):
            self.filesystem, self.root = filesystem or _filesystem(url), _root(url)

    def listing(self) -> dict[str, Entry]:
        """Every object below the folder, or the object itself under the name ''; empty if nothing is there.

        Raises:
            DataError: for names that could lead out of a folder, too many objects, and errors of the store.
        """
        from pyarrow import fs

        with self._errors("listed"):
            if self.url.parts and self.filesystem.get_file_info([self.root])[0].type == fs.FileType.File:
                found = self.filesystem.get_file_info([self.root])
            else:
                selector = fs.FileSelector(self.root, allow_not_found=True, recursive=True)
                found = self.filesystem.get_file_info(selector)
        files = [each for each in found if each.type == fs.FileType.File]
        if len(files) > MOST_OBJECTS:
            raise DataError(
                f"{self.url}: holds {len(files):,} objects; at most {MOST_OBJECTS:,} are read: name a folder in it"
            )
        start = len(self.root.strip("/")) + 1
        named = {each.path.removeprefix("/")[start:]: each for each in files}
        named = {name: each for name, each in named.items() if STATE not in name.split("/")}
        self._check(named)
        tags = self._tags([each.path for each in named.values()]) if len(named) <= MOST_TAGGED else {}
        return {
            name: Entry.of(int(each.size or 0), tags.get(each.path, ""), each.mtime_ns)
            for name, each in sorted(named.items())
        }

    def _check(self, named: Mapping[str, Any]) -> None:
        """Refuse objects that can't all be files of one folder."""
        problems = []
        for name, each in named.items():
            if name and (problem := name_problem(name)):
                problems.append(f"the object {name!r} {problem}")
            if each.size is None or each.size < 0:
                problems.append(f"the object {name!r} has no size")
            above = name.split("/")[:-1]
            if "/".join(above) in named and above:
                problems.append(f"'{'/'.join(above)}' is an object and a folder at once")
            if len(problems) > 10:
                break
        PathError.refuse(f"{self.url}: can't be copied; rename or remove these objects", problems)

    def _tags(self, paths: Iterable[str]) -> dict[str, str]:
        """The entity tags of objects, where the store has such."""

        def tag(path: str) -> tuple[str, str]:
            with self.filesystem.open_input_file(path) as opened:
                return path, _tag(opened)

        with self._errors("read"), ThreadPoolExecutor(AT_ONCE) as pool:
            return {path: found for path, found in pool.map(tag, paths) if found}

    def download(self, names: Mapping[str, Entry], folder: Path, place: Callable[[str], Path]) -> None:
        """Write objects to files, each whole or not at all. Raises Replaced if one is not what was listed."""

        def one(item: tuple[str, Entry]) -> None:
            name, entry = item
            target = place(name)
            confined(folder, str(target.relative_to(folder)))
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(target)
            try:
                left = entry.size
                with temporary.open("wb") as file, self._errors("read"), self._reading(name) as stream:
                    if entry.tag and _tag(stream) != entry.tag:
                        raise Replaced(f"{self.url}: the object '{name}' was replaced while it was read: try again")
                    while data := stream.read(min(BUFFER_BYTES, left + 1)):
                        left -= len(data)
                        if left < 0:
                            break
                        file.write(data)
                if left:
                    raise Replaced(
                        f"{self.url}: the object '{name}' is not {entry.size:,} bytes, as the store says: try again"
                    )
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(one, names.items()))

    def upload(self, file: Path, name: str = "", *, alive: Callable[[], None] = lambda: None) -> None:
        """Write a file as one object, which appears once it is whole; `alive` is called now and then."""
        with file.open("rb") as stream, self._errors("written"), self._writing(name) as out:
            while data := stream.read(BUFFER_BYTES):
                out.write(data)
                alive()

    def put(self, name: str, text: str) -> None:
        """Write a short text as an object."""
        with self._errors("written"), self._writing(name) as out:
            out.write(text.encode())

    def get(self, name: str, most: int = 1 << 20) -> str | None:
        """The text of a short object; None if it is not there."""
        with suppress(_NotThere), self._errors("read"), self._reading(name) as stream:
            return str(stream.read(most).decode(errors="replace"))
        return None

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        with suppress(_NotThere), self._errors("removed"):
            self.filesystem.delete_file(self._path(name))

    def state(self, folder: str) -> dict[str, int]:
        """The objects in a folder of `STATE`, with their times in nanoseconds by the store's clock."""
        from pyarrow import fs

        selector = fs.FileSelector(self._path(f"{STATE}/{folder}"), allow_not_found=True)
        with self._errors("listed"):
            found = self.filesystem.get_file_info(selector)
        return {each.base_name: int(each.mtime_ns or 0) for each in found if each.type == fs.FileType.File}

    def exists(self, paths: Iterable[Url]) -> list[bool]:
        """Whether objects of the same store are there."""
        from pyarrow import fs

        with self._errors("read"):
            found = self.filesystem.get_file_info([_root(each) for each in paths])
        return [each.type == fs.FileType.File for each in found]

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _reading(self, name: str) -> Any:
        return self.filesystem.open_input_stream(self._path(name), compression=None)

    def _writing(self, name: str) -> Any:
        path = self._path(name)
        if self.url.scheme == "hdfs":  # its folders must be there
            self.filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        return self.filesystem.open_output_stream(path, compression=None)

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        """Tell an error of the store as a user's, without what would give away a secret."""
        try:
            yield
        except FileNotFoundError:
            raise _NotThere(f"{self.url}: is not there") from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno is not None and of_the_machine(error) is not None:
                raise
            said = str(error).strip().splitlines()[0][:500] if str(error).strip() else type(error).__name__
            for variable in _SECRETS:
                if len(secret := os.environ.get(variable, "")) > 3:
                    said = said.replace(secret, "***")
            raise DataError(
                f"{self.url}: can't be {done}: {said}; check the name, the network and the store's credentials"
            ) from None


class Replaced(DataError):
    """An object that is not the one that was listed."""


class _NotThere(DataError):
    """An object that is not there."""


def _tag(opened: Any) -> str:
    """The entity tag of an opened object; '' if the store has none."""
    tag: bytes = dict(opened.metadata() or {}).get(b"ETag", b"")
    return tag.decode(errors="replace")


def free_bytes(folder: Path) -> int:
    """Bytes that can be written to the disk of a folder."""
    return shutil.disk_usage(folder).free


def _root(url: Url) -> str:
    """The path of a URL inside its file system."""
    key = "/".join(url.parts)
    if url.scheme == "hdfs":
        return f"/{key}"
    return f"{url.host}/{key}" if key else url.host


def _filesystem(url: Url) -> fs.FileSystem:
    """The file system of a URL, with the store's own credentials."""
    from pyarrow import fs

    kind = {"s3": "S3FileSystem", "gs": "GcsFileSystem", "hdfs": "HadoopFileSystem"}[url.scheme]
    if not hasattr(fs, kind):
        raise MissingExtraError(f"{url}: this pyarrow was built without {kind}; install a wheel of pyarrow that has it")
    if url.scheme == "gs":
        return fs.GcsFileSystem()
    if url.scheme == "hdfs":
        host, _, port = url.host.partition(":")
        return fs.HadoopFileSystem(host or "default", int(port or 0))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint is None and region is None:
        region = fs.resolve_s3_region(url.host)
    return fs.S3FileSystem(
        region=region or "us-east-1", endpoint_override=endpoint, connect_timeout=10, request_timeout=60
    )
