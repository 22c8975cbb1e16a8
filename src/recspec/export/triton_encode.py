"""Raw values to a model's inputs, as a Triton Python model that needs numpy alone.

`recspec export --format triton` copies this file as `model.py` beside `raw_values.py`, `text_vectors.py` and
`hashing.py`, which hold the rules of every encoder. `encode.json`, `vocabularies` and `of_texts` hold what `prepare`
fitted. `of_items` holds the values of the item catalogue that belong to the events of a history, by the item's id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.data.encoding import raw_values, text_vectors

Values = NDArray[Any]
ENCODE_FILE, OF_ITEMS, OF_TEXTS = "encode.json", "of_items", "of_texts"


class Encoding:
    """The features of `encode.json`, the vocabularies, and for some histories a value of each item."""

    def __init__(
        self,
        described: Mapping[str, Any],
        vocabularies: Mapping[str, Sequence[str | int]],
        of_items: Mapping[str, Values] | None = None,
        of_texts: Mapping[str, text_vectors.TextProjection] | None = None,
    ) -> None:
        self.columns: list[dict[str, Any]] = described["columns"]
        self._features = [
            SimpleNamespace(
                **{
                    **each,
                    "encoder": SimpleNamespace(**each["encoder"]),
                    "items": SimpleNamespace(**each["items"]) if "items" in each else None,
                }
            )
            for each in described["features"]
        ]
        self._of_items, self._of_texts = of_items or {}, of_texts or {}
        self._vocabularies = {name: raw_values.KnownValues(values) for name, values in vocabularies.items()}

    @classmethod
    def load(cls, folder: Path) -> Encoding:
        """Read `encode.json`, and the vocabularies and the catalogue's columns beside it."""
        described = json.loads((folder / ENCODE_FILE).read_text(encoding="utf-8"))
        encoders = [part for each in described["features"] for part in (each["encoder"], each.get("items")) if part]
        names = {encoder.get("vocabulary") for encoder in encoders} - {None}
        files = {name: folder / "vocabularies" / f"{name}.json" for name in sorted(names)}
        vocabularies = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
        tables = {file.stem: np.load(file, allow_pickle=False) for file in sorted((folder / OF_ITEMS).glob("*.npy"))}
        texts = {}
        for file in sorted((folder / OF_TEXTS).glob("*.npz")):
            with np.load(file, allow_pickle=False) as held:
                texts[file.stem] = text_vectors.TextProjection(held["buckets"], held["rarity"], held["weights"])
        return cls(described, vocabularies, tables, texts)

    def encode(self, columns: Mapping[str, Values]) -> dict[str, Values]:
        """The model's inputs (B, width) of raw columns: (B, 1), or (B, n) of lists; texts as bytes, numbers float64.

        Missing values are the empty text and NaN.

        Raises:
            ValueError: naming a row with a text that is not a number, or with more or fewer numbers than items.
        """
        return {each.name: self._feature(each, columns).astype(each.dtype) for each in self._features}

    def _feature(self, feature: SimpleNamespace, columns: Mapping[str, Values]) -> Values:
        encoder = feature.encoder
        parts = [columns[name] for name in feature.columns]
        if feature.items is not None:
            return self._of_events(feature, *parts)
        if encoder.kind == "cross":
            rows = max(len(part) for part in parts)
            return raw_values.cross_ids(encoder, [_texts(np.broadcast_to(part, (rows, 1))[:, 0]) for part in parts])[
                :, None
            ]
        (values,) = parts
        if encoder.kind == "text":
            texts = raw_values.present(encoder, _texts(values[:, 0]))
            return self._of_texts[encoder.projection].vectors([text or "" for text in texts])
        if encoder.kind == "vector":
            return raw_values.encode_vectors(encoder, values)
        if encoder.kind in ("number", "scale", "bucket"):
            numbers = raw_values.numbers_of(encoder, _texts(values[:, 0]))
            return raw_values.encode_numbers(encoder, numbers)[:, None]
        if not feature.is_list:
            return self._ids(encoder, [text or None for text in _texts(values[:, 0])])[:, None]
        texts, offsets = _lists(encoder, values)
        ids = self._ids(encoder, texts)
        keep: Any = getattr(encoder, "keep", "first")
        return _padded(*raw_values.of_known(ids, ids, offsets, feature.width, keep), feature.width)

    def _of_events(self, feature: SimpleNamespace, items: Values, given: Values | None = None) -> Values:
        """A value of each known item of a history: from the catalogue, or the numbers given beside the items."""
        texts, offsets = _lists(feature.items, items)
        ids = self._ids(feature.items, texts)
        values = self._of_items[feature.name][ids] if given is None else _numbers_of_events(feature, given, offsets)
        return _padded(*raw_values.of_known(values, ids, offsets, feature.width, "last"), feature.width)

    def _ids(self, encoder: SimpleNamespace, texts: Sequence[str | None]) -> Values:
        return raw_values.encode_ids(encoder, texts, self._vocabularies.get(getattr(encoder, "vocabulary", "")))


def _texts(values: Values) -> Any:
    """Values (B,) as texts; numbers stay an array."""
    if values.dtype.kind == "f":
        return values
    return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values]


def _lists(encoder: SimpleNamespace, values: Values) -> tuple[list[str], NDArray[np.int64]]:
    """The values of all rows' lists without empty ones, and each row's offset.

    A list is a text cut at the separator, or several columns.
    """
    texts = raw_values.present(encoder, _texts(values.ravel()))
    counts = np.full(len(values), values.shape[1])
    if encoder.separator is not None:
        parts = [(text or "").split(encoder.separator) for text in texts]
        counts = np.array([len(part) for part in parts], np.int64)
        texts = raw_values.present(encoder, [text for part in parts for text in part])
    owners = np.repeat(np.arange(len(values)), counts)[np.array([bool(text) for text in texts], bool)]
    counts = np.bincount(owners, minlength=len(values))
    return [text for text in texts if text], np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _numbers_of_events(feature: SimpleNamespace, values: Values, offsets: NDArray[np.int64]) -> Values:
    """A number for each item of each row (T,), 0 for all if the whole column is empty.

    Raises:
        ValueError: naming a row that has not as many numbers as items, or a text that is no number.
    """
    counts = np.diff(offsets)
    if values.dtype.kind == "f":
        own, numbers = (~np.isnan(values)).sum(axis=1), values[~np.isnan(values)]
    else:
        texts, ends = _lists(feature.encoder, values)
        own, numbers = np.diff(ends), raw_values.numbers_of(feature.encoder, texts)
    if not len(numbers):
        return np.zeros(counts.sum())
    wrong = np.flatnonzero(own != counts)
    if len(wrong):
        row, name = wrong[0], feature.columns[-1]
        raise ValueError(
            f"row {row + 1} holds {own[row]} numbers in '{name}' beside {counts[row]} items; expected one "
            "for each, or none in any row"
        )
    return raw_values.encode_numbers(feature.encoder, numbers)


def _padded(values: Values, offsets: NDArray[np.int64], width: int) -> Values:
    """Lists of at most `width` values as rows (B, width), with 0 behind them."""
    made = np.zeros((len(offsets) - 1, width), values.dtype)
    made[np.arange(width) < np.diff(offsets)[:, None]] = values
    return made


class TritonPythonModel:
    """The interface that Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the encoders of this version."""
        assert int(np.__version__.split(".")[0]) < 2, "this server's Python backend corrupts tensors of numpy 2"
        self.encoding = Encoding.load(Path(args["model_repository"]) / args["model_version"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Encode each request; a value that can't be encoded is the error of its request alone."""
        import triton_python_backend_utils as pb

        answers = []
        for request in requests:
            try:
                given = {
                    each["name"]: pb.get_input_tensor_by_name(request, each["name"]).as_numpy()
                    for each in self.encoding.columns
                }
                outputs = [
                    pb.Tensor(name, np.ascontiguousarray(made)) for name, made in self.encoding.encode(given).items()
                ]
                answers.append(pb.InferenceResponse(output_tensors=outputs))
            except ValueError as error:
                answers.append(pb.InferenceResponse(error=pb.TritonError(f"raw values: {error}")))
        return answers
