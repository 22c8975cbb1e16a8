"""The files that parts of a table are written to, wherever that happens, and their place in the prepared folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from recspec.files import whole_file
from recspec.prepare.backend import Backend
from recspec.prepare.names import SPLITS
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
    """Move the files of all parts into a folder; a split becomes one chunk."""
    chunks: dict[str, tuple[Chunk, ...]] = {}
    for split in SPLITS:
        held = [(part.folder, chunk) for part in parts for chunk in part.chunks.get(split, ())]
        paths = [place / name for place, chunk in held for name in chunk.files]
        if paths:
            names = tuple(f"{split}/part-{number:05d}.parquet" for number in range(len(paths)))
            (folder / split).mkdir()
            for path, name in zip(paths, names, strict=True):
                path.replace(folder / name)
            chunks[split] = (held[0][1].model_copy(update={"files": names}),)
    users = [path for part in parts if (path := part.folder / USERS_FILE).exists()]
    if len(users) == 1:
        users[0].replace(folder / USERS_FILE)
    elif users:
        backend.call(partial(_join, users, folder / USERS_FILE))
    return chunks


def _join(paths: Sequence[Path], target: Path) -> None:
    with whole_file(target) as temporary, closing(UserFile(temporary)) as users:
        for path in paths:
            with pq.ParquetFile(path) as file:
                for group in range(file.num_row_groups):
                    users.write(file.read_row_group(group))
