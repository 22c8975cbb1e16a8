"""The exported ranker: a raw request and its candidates in, probabilities out, through an exported program.

`RequestEncoder` encodes clean values of scalar features. The `Predictor` encodes everything else: lists, crosses,
histories, and columns that a catalogue knows. One call of the program scores all candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recspec.base.errors import BundleError, DataError, RequestError, listed
from recspec.data.encoding import Arrays, Encoders, RequestEncoder, raw_names, row_at
from recspec.export.exported_model import ExportedModel, as_inputs, open_exported_model
from recspec.feature_spec import LOGIT, PROBABILITY, Port, Signature
from recspec.inference import Predictor, Row, known_columns, table_of

Columns = Mapping[str, Sequence[Any]]


class ExportedRanker:
    """An exported program that takes raw values. Any number of threads may call it."""

    def __init__(self, predictor: Predictor, program: ExportedModel) -> None:
        """Join a model's encoders and the program exported from it. Raises BundleError for another model's program."""
        inputs, spec = program.signature.inputs, predictor.spec
        theirs, ours = {port.name for port in inputs}, set(predictor.model.features())
        if theirs != ours:
            differing = listed(sorted(theirs ^ ours))
            raise BundleError(
                f"{predictor.bundle.folder}: only one of model and export reads {differing}; the export was made of "
                "another model: export this one"
            )
        self.predictor, self.program = predictor, program
        items, (of_request, of_items) = set(spec.role("item")), predictor.row_encoder.request_encoders
        encoders = predictor.encoders or Encoders({}, {})
        self._request = _Side(encoders, [port for port in inputs if port.name not in items], of_request)
        self._items = _Side(encoders, [port for port in inputs if port.name in items], of_items)
        self._in_request_alone = self._request.sources - self._items.sources
        self._in_items_alone = self._items.sources - self._request.sources
        if not self._items.ports:
            raise BundleError(f"{predictor.bundle.folder}: the model reads no item feature, so candidates can't differ")

    @classmethod
    def open(cls, run: str | Path, export: str | Path, *, threads: int | None = None) -> ExportedRanker:
        """Open a run (or bundle) and the export made of it.

        Args:
            threads: Threads that compute one call; by default one a core.

        Raises:
            BundleError: if either is missing, damaged, or not of the other.
        """
        return cls(Predictor.open(run, device="cpu"), open_exported_model(Path(export), threads=threads))

    def probabilities(self, request: Row, candidates: Sequence[Row] | Columns) -> NDArray[np.float32]:
        """The probability (N,) of each of N candidates, in their order.

        Raises `BundleError` for a model that only ranks; see `scores`.
        """
        if PROBABILITY not in self.program.signature.outputs:
            raise BundleError(
                f"{self.predictor.bundle.folder}: the model ranks and gives no probabilities; ask for scores"
            )
        return self._run(request, candidates, PROBABILITY)

    def scores(self, request: Row, candidates: Sequence[Row] | Columns) -> NDArray[np.float32]:
        """The logit (N,) of each of N candidates, in their order, of any model.

        Missing and unknown values are not reported, and unused columns are skipped; `POST /rank` reports both.

        Args:
            request: Raw values of the user and the context.
            candidates: Raw values of the items: an object each, or a column of N values each.

        Raises:
            RequestError: naming every value that can't be read, and columns that belong to the other side.
        """
        return self._run(request, candidates, LOGIT)

    def _run(self, request: Row, candidates: Sequence[Row] | Columns, output: str) -> NDArray[np.float32]:
        self._check(request, candidates)
        if not len(next(iter(candidates.values()), ()) if isinstance(candidates, Mapping) else candidates):
            return np.zeros(0, np.float32)
        found: NDArray[np.float32] = self.program.run(self.inputs(request, candidates))[output][:, 0]
        return found

    def inputs(self, request: Row, candidates: Sequence[Row] | Columns) -> Arrays:
        """The program's inputs: (N, L) of the candidates, (1, L) of the request, or (N, L) in the form `rows`."""
        try:
            once = self._request.encode_clean({name: (value,) for name, value in request.items()})
            if once is None:
                once = self._encoded([request], self._request.ports, "request")
            columns = candidates if isinstance(candidates, Mapping) else self._items.columns(candidates)
            many = None if columns is None else self._items.encode_clean(columns)
            if many is None:
                many = self._encoded(_rows(candidates), self._items.ports, "candidates")
        except DataError:
            return self._together(request, _rows(candidates))
        if self.program.signature.form == "rows":
            rows = len(next(iter(many.values())))
            once = {name: np.repeat(each, rows, axis=0) for name, each in once.items()}
        return once | many

    def _check(self, request: object, candidates: object) -> None:
        """Refuse malformed input, and columns on the wrong side: they would be skipped though the model reads them."""
        if not isinstance(request, Mapping):
            raise RequestError(f"request: is {_kind(request)}; expected an object of raw values")
        if isinstance(candidates, Mapping):
            lengths = {name: len(values) if isinstance(values, Sized) else -1 for name, values in candidates.items()}
            texts = any(isinstance(values, (str, bytes)) for values in candidates.values())
            if texts or -1 in lengths.values() or len({*lengths.values()}) > 1:
                told = ", ".join(f"'{name}': {'no column' if n < 0 else n}" for name, n in lengths.items())
                raise RequestError(f"candidates: expected columns of one length; found values by column: {told}")
            given: Iterable[str] = candidates
        else:
            if isinstance(candidates, (str, bytes)) or not isinstance(candidates, Sequence):
                raise RequestError(f"candidates: is {_kind(candidates)}; expected a list of objects, or columns")
            if {*map(type, candidates)} - {dict}:
                wrong = next((place for place, row in enumerate(candidates) if not isinstance(row, Mapping)), None)
                if wrong is not None:
                    raise RequestError(
                        f"{row_at(wrong, 'candidates')} is {_kind(candidates[wrong])}; expected an object of raw "
                        f"values, as {{'{self._items.ports[0].name}': ...}}"
                    )
            given = candidates[0] if candidates else ()
        strayed = [(name, "request", "candidates") for name in request if name in self._in_items_alone]
        strayed += [(name, "candidates", "request") for name in given if name in self._in_request_alone]
        if strayed:
            problems = [f"'{name}' is in the {here}; expected in the {there}" for name, here, there in strayed]
            raise RequestError.of("request and candidates", problems)

    def _together(self, request: Row, rows: Sequence[Row]) -> Arrays:
        """Inputs of a model with a feature of columns of both sides, such as a cross."""
        ports = self.program.signature.inputs
        try:
            inputs = self._encoded([{**request, **row} for row in rows], ports, "request and candidates")
        except DataError as error:
            raise RequestError.of("request and candidates", error.problems) from None
        if self.program.signature.form == "rows":
            return inputs
        for port in self._request.ports:
            if (inputs[port.name] != inputs[port.name][:1]).any():
                raise RequestError(
                    f"{port.name} differs from candidate to candidate, and the export takes one for all; "
                    "export the model with --form rows"
                )
            inputs[port.name] = inputs[port.name][:1]
        return inputs

    def _encoded(self, rows: Sequence[Row], ports: Sequence[Port], where: str) -> Arrays:
        """Inputs (B, L) of rows of any kind, by the `Predictor`."""
        if not ports:
            return {}
        table: pa.Table = table_of(rows, where, known_columns(self.predictor.spec, self.predictor.encoders))
        named = self.predictor.row_encoder.named(table)
        batch, _ = self.predictor.encode(named, [port.name for port in ports])
        return as_inputs(batch, Signature("rows", tuple(ports)))


class _Side:
    """The inputs that belong to the request, or to its candidates."""

    def __init__(self, encoders: Encoders, ports: Sequence[Port], encoder: RequestEncoder) -> None:
        self.ports, self._encoder = tuple(ports), encoder
        names = [port.name for port in ports]
        self.sources = frozenset(raw_names(encoders, names))  # possible names of the raw columns
        self._all = encoder.features == set(names)

    def encode_clean(self, columns: Columns) -> Arrays | None:
        """Inputs (B, 1) of columns; None if a column or value needs the `Predictor`."""
        return self._encoder.columns(columns) if self._all else None

    def columns(self, rows: Sequence[Row]) -> Columns | None:
        """The columns that the model reads, of rows; None if the rows have different columns."""
        if not self._all:
            return None
        names = [name for name in self._encoder.sources if name in rows[0]]
        try:
            if len(names) < 2:
                return {name: [row[name] for row in rows] for name in names}
            return dict(zip(names, zip(*map(itemgetter(*names), rows), strict=True), strict=True))
        except KeyError:
            return None


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _rows(candidates: Sequence[Row] | Columns) -> Sequence[Row]:
    if not isinstance(candidates, Mapping):
        return candidates
    return [dict(zip(candidates, values, strict=True)) for values in zip(*candidates.values(), strict=True)]
