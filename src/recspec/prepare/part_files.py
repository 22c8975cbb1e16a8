"""The files that parts of a table are written to, wherever that happens, and their place in the prepared folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copyfileobj

import pyarrow.parquet as pq

from recspec.files import whole_file
from recspec.prepare.backend import Backend, Share
from recspec.prepare.names import NEW, SPLITS
from recspec.prepare.user_file import UserFile
from recspec.spec import Chunk, Feature
from recspec.storage import SplitWriter

USERS_FILE = "users.parquet"


@dataclass(frozen=True)
class PartFiles:
    """The files of a part: a chunk for each split with rows, and a catalogue of users if rows have histories."""

    folder: Path
    chunks: Mapping[str, tuple[Chunk, ...]]

    @classmethod
    def of(cls, folder: Path, writers: Mapping[str, SplitWriter]) -> PartFiles:
        """From writers that are closed."""
        return cls(folder, {name: writer.chunks for name, writer in writers.items() if writer.num_rows})


@contextmanager
def part_writers(
    folder: Path, features: Mapping[str, Mapping[str, Feature]]
) -> Iterator[tuple[Mapping[str, SplitWriter], UserFile]]:
    """Writers of a part's splits, whose features are given, and of its users."""
    with ExitStack() as stack:
        splits = {name: stack.enter_context(SplitWriter(folder, name, own)) for name, own in features.items()}
        yield splits, stack.enter_context(closing(UserFile(folder / USERS_FILE)))


def gather(backend: Backend, folder: Path, parts: Sequence[PartFiles]) -> dict[str, tuple[Chunk, ...]]:
    """Move the files of all parts into a folder; the chunks of a split are those of a part, its new rows last.

    Parquet files stay apart. Files of other formats, of which a chunk has one, are joined in the order of the parts.
    """
    chunks: dict[str, tuple[Chunk, ...]] = {}
    joins: list[tuple[Sequence[Path], Path]] = []
    for split in (*SPLITS, *(f"{split}{NEW}" for split in SPLITS)):
        own = [part for part in parts if part.chunks.get(split)]
        if not own:
            continue
        (folder / split).mkdir()
        found = []
        for number, chunk in enumerate(own[0].chunks[split]):
            paths = [part.folder / name for part in own for name in part.chunks[split][number].files]
            names = chunk.files
            if chunk.type == "parquet":
                names = tuple(f"{split}/part-{place:05d}.parquet" for place in range(len(paths)))
            if len(names) == len(paths):
                for path, name in zip(paths, names, strict=True):
                    path.replace(folder / name)
            else:
                joins.append((paths, folder / names[0]))
            found.append(chunk.model_copy(update={"files": names}))
        chunks[split] = tuple(found)
    if joins:
        backend.each_share(joins, _joined, lambda _: None)
    users = [path for part in parts if (path := part.folder / USERS_FILE).exists()]
    if len(users) == 1:
        users[0].replace(folder / USERS_FILE)
    elif users:
        backend.call(partial(_join, users, folder / USERS_FILE))
    return {split: _with_new(chunks.get(split, ()), chunks.get(f"{split}{NEW}", ())) for split in SPLITS
            if split in chunks or f"{split}{NEW}" in chunks}  # fmt: skip


def _with_new(held: tuple[Chunk, ...], new: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The chunks of a split with the files of its new rows after the others."""
    if not held or not new:
        return held or new
    return tuple(one.model_copy(update={"files": (*one.files, *two.files)}) for one, two in zip(held, new, strict=True))


def _joined(share: Share[tuple[Sequence[Path], Path]]) -> None:
    """Write the bytes of files, one after the other, as one."""
    paths, target = share.item
    with whole_file(target) as temporary, temporary.open("wb") as file:
        for path in paths:
            with path.open("rb") as source:
                copyfileobj(source, file, 1 << 20)


def _join(paths: Sequence[Path], target: Path) -> None:
    with whole_file(target) as temporary, closing(UserFile(temporary)) as users:
        for path in paths:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    users.write(file.read_row_group(group))
