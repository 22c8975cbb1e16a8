"""Probabilities of a file of raw rows, or of a prepared split, written to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from recspec.batch import to_device
from recspec.encoding import Predictions, Vocabulary, renumbered, row_at
from recspec.errors import DataError, SettingsError, SpecError, unknown
from recspec.evaluation import as_batch, check_same_features, id_feature
from recspec.inference.catalogue import ROLES
from recspec.inference.predictor import Predictor
from recspec.inference.row_files import ROW_FORMATS, ROWS, read_rows, row_writer
from recspec.spec import FeatureSpec
from recspec.storage import Column, Ragged, open_split

Progress = Callable[[str, float, float | None], None]


def silent(stage: str, done: float, total: float | None) -> None:
    """Report no progress."""


def predict_file(
    predictor: Predictor, rows: Path, out: Path | None, *, columns: Sequence[str] | None = None
) -> Predictions:
    """Score a csv, jsonl or parquet file of raw rows, and write them with `probability` to a file of the kind of `out`.

    Writes the columns named in `columns`, in that order, by default all. Without `out`, CSV goes to standard output.
    Files larger than memory pass through in blocks.

    Raises:
        DataError: if the file can't be read, or a row holds what it can't.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there.
    """
    total = Predictions()
    with row_writer(out) as write:
        for table in read_rows(rows):
            if "probability" in table.column_names:
                raise DataError(f"{rows}: has a column 'probability' already; rename or remove it")
            names = {name.strip(): name for name in table.column_names}  # ` ad_id` where blanks follow the commas
            chosen = () if columns is None else _chosen(columns, list(names), rows)
            with _counted_from(total.rows):
                probability, found = predictor.predict(table)
            total += found
            scored = table.append_column("probability", pa.array(probability))
            if columns is not None:
                scored = scored.select([names[name] for name in chosen] + ["probability"])
                scored = scored.rename_columns([*chosen, "probability"])
            write(scored)
    return total


@contextmanager
def _counted_from(first: int) -> Iterator[None]:
    """Count the rows of a file through all of its blocks, in problems with them."""
    try:
        yield
    except DataError as error:
        if not first:
            raise
        problems = [problem.removeprefix("raw rows: ") for problem in error.problems]
        problems = [renumbered(problem, lambda place: row_at(first + place)) for problem in problems]
        raise DataError.of("raw rows", problems) from None


def predict_split(
    predictor: Predictor,
    spec: FeatureSpec,
    split: str,
    out: Path | None,
    *,
    columns: Sequence[str] | None = None,
    progress: Progress = silent,
) -> Predictions:
    """Score a split of a prepared dataset, labelled or not, and write its rows with `probability`.

    The columns before it are those of the group, the user's and the item's id and the label that the split holds, or
    `columns`: any features that are not lists. Ids are written as raw values where there is a vocabulary, and the
    unknown one as null. The ending of `out` says the format; without `out`, CSV goes to standard output. Rows pass
    through in blocks, so memory does not grow with their number.

    Raises:
        SpecError: an unknown split, or another dataset than the model was trained on.
        SettingsError: if `out` has an ending that is none of .csv, .jsonl, .parquet, or a column is not there.
    """
    _point_to_raw_rows(spec, split)
    held = spec.columns(split)
    check_same_features(predictor.model, spec)
    features = predictor.model.features()
    ids = (spec.group, *(id_feature(spec, role) for role in ROLES), spec.label)
    shown = tuple(dict.fromkeys(name for name in ids if name is not None and name in held))
    if columns is not None:
        scalars = [name for name in held if not spec.features[name].is_list]
        shown = _chosen(columns, scalars, f"{spec.folder}, split '{split}'")
    vocabularies = {name: found for name in shown if (found := _vocabulary_of(spec, name)) is not None}
    reader = open_split(spec, split, tuple(dict.fromkeys((*features, *shown))))
    total = Predictions()
    with row_writer(out) as write:
        for start, stop in pairwise(reader.blocks(ROWS).tolist()):
            progress("predict", start, reader.num_rows)
            block = reader.read(start, stop)
            batch = to_device(as_batch({name: block[name] for name in features}, spec), predictor.device)
            probability = predictor.probabilities(batch, stop - start)
            rows = {name: _raw(block[name], spec, name, vocabularies.get(name)) for name in shown}
            write(pa.table({**rows, "probability": pa.array(probability)}))
            total.rows += stop - start
    progress("predict", total.rows, reader.num_rows)
    return total


def _chosen(columns: Sequence[str], known: Sequence[str], where: Path | str) -> tuple[str, ...]:
    """The columns to write before `probability`, each once."""
    chosen = tuple(dict.fromkeys(name for name in columns if name != "probability"))
    strange = [name for name in chosen if name not in known]
    if strange:
        raise SettingsError(f"--columns: {where}: {unknown('column', strange, known)}")
    return chosen


def _point_to_raw_rows(spec: FeatureSpec, split: str) -> None:
    """Point to a file of raw rows beside the splits, such as Outbrain's clicks_test, if the name is that file's.

    Raises:
        SpecError: if there is such a file and no such split.
    """
    if split in spec.splits or "/" in split:
        return
    file = next((file for ending in ROW_FORMATS if (file := spec.folder / f"{split}{ending}").is_file()), None)
    if file is not None:
        raise SpecError(
            f"{spec.folder}: {unknown('split', split, spec.splits)}; {file} is there: "
            f"if it holds raw rows, `recspec predict RUN {file}`"
        )


def _vocabulary_of(spec: FeatureSpec, name: str) -> Vocabulary | None:
    """The raw values of a feature's ids, where `prepare` wrote them beside the specification."""
    file = spec.vocabulary_file(spec.vocabulary(name)) if spec.features[name].is_categorical else None
    return Vocabulary.load(file) if file is not None and file.is_file() else None


def _raw(column: Column, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None) -> pa.Array:
    assert not isinstance(column, Ragged), "a group, an id or a label is a scalar"
    if vocabulary is not None:
        return vocabulary.decode(column.astype(np.int64))
    shift = spec.shift(name)
    return pa.array(column - shift if shift else column)
