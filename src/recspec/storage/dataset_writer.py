"""Writing a whole dataset: its folder, its splits and its specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from recspec.errors import DataError
from recspec.files import local, locked, whole_folder
from recspec.spec import FILE_NAME, Chunk, ChunkType, FeatureSpec
from recspec.storage.ragged import Columns
from recspec.storage.writer import SplitWriter


@contextmanager
def new_dataset(out: str | Path) -> Iterator[Path]:
    """A folder that becomes `out` when the block succeeds, and is removed when it fails.

    Raises:
        DataError: if `out` holds something, is a file or a URL, or another process is writing it.
    """
    folder = local(out, "OUT")
    with locked(folder, "writing"):
        if (folder / FILE_NAME).exists():
            raise DataError(f"{folder}: holds a dataset already; name an empty folder, or remove that one first")
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise DataError(f"{folder}: already exists and is not an empty folder; choose another place")
        with whole_folder(folder) as temporary:
            yield temporary


def write_dataset(
    spec: FeatureSpec,
    folder: Path,
    type: ChunkType,
    splits: Mapping[str, tuple[Sequence[str], Iterable[Columns]]],
    num_rows: int,
    *,
    rows_per_file: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureSpec:
    """Write some features of each split, block by block, and the specification with the new files."""
    done = 0
    sources: dict[str, tuple[Chunk, ...]] = {}
    for split, (names, blocks) in splits.items():
        features = {name: spec.features[name] for name in names}
        with SplitWriter(folder, split, features, type, rows_per_file=rows_per_file, label=spec.label) as writer:
            for columns in blocks:
                writer.write(columns)
                if progress is not None:
                    progress(done + writer.num_rows, num_rows)
        done += writer.num_rows
        sources[split] = writer.chunks
    written = spec.replace(sources=sources, folder=folder, allow_outside=False)
    written.save(folder)
    return written
