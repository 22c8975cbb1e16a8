"""Raw values to a model's inputs, as a Triton Python model: `prepare`'s encoders where there is numpy alone.

`recspec export --format triton` writes this file as `model.py` beside `hashing.py` and `encode.json`, which holds what
`prepare` fitted; what the item catalogue knows of the events of a history lies in `of_items`, by the item's id. It
imports nothing else of recspec; tests hold it to `recspec.encoding` and `recspec.predict`, value by value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.hashing import Prints, cross, fingerprint64_of_bytes

Values = NDArray[Any]
ENCODE_FILE, OF_ITEMS = "encode.json", "of_items"
WHOLE = re.compile(r"-?[0-9]{1,18}(\.0+)?")


class Encoding:
    """What `encode.json` says, its vocabularies as dictionaries, and for some histories a value of each item."""

    def __init__(
        self,
        told: Mapping[str, Any],
        vocabularies: Mapping[str, Sequence[str | int]],
        of_items: Mapping[str, Values] | None = None,
    ) -> None:
        self.columns: list[dict[str, Any]] = told["columns"]
        self.features: list[dict[str, Any]] = told["features"]
        self.of_items = of_items or {}
        self.ids = {name: {value: id_ for id_, value in enumerate(values, 1)} for name, values in vocabularies.items()}
        self.whole = {name for name, values in vocabularies.items() if any(isinstance(each, int) for each in values)}

    @classmethod
    def load(cls, folder: Path) -> Encoding:
        """Read `encode.json`, and the vocabularies and the catalogue's columns beside it."""
        told = json.loads((folder / ENCODE_FILE).read_text(encoding="utf-8"))
        encoders = [part for each in told["features"] for part in (each["encoder"], each.get("items")) if part]
        names = {encoder.get("vocabulary") for encoder in encoders} - {None}
        files = {name: folder / "vocabularies" / f"{name}.json" for name in sorted(names)}
        vocabularies = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}
        tables = {file.stem: np.load(file, allow_pickle=False) for file in sorted((folder / OF_ITEMS).glob("*.npy"))}
        return cls(told, vocabularies, tables)

    def encode(self, columns: Mapping[str, Values]) -> dict[str, Values]:
        """The model's inputs (B, width) of raw columns: (B, 1), or (B, n) of lists; texts as bytes, numbers float64.

        Missing values are the empty text and NaN.
        """
        return {each["name"]: self._feature(each, columns) for each in self.features}

    def _feature(self, feature: Mapping[str, Any], columns: Mapping[str, Values]) -> Values:
        encoder, width = feature["encoder"], feature["width"]
        parts = [columns[name] for name in feature["columns"]]
        if feature.get("items"):
            return self._beside(feature, *parts)
        if encoder["kind"] == "cross":
            rows = max(len(part) for part in parts)
            ids = _cross(encoder, [np.broadcast_to(part, (rows, 1))[:, 0] for part in parts])
            return ids[:, None].astype(feature["dtype"])
        (values,) = parts
        if encoder["kind"] in ("number", "scale", "bucket"):
            numbers = _NUMBERS[encoder["kind"]](encoder, _numbers(encoder, values[:, 0]))
            return numbers[:, None].astype(feature["dtype"])
        if not feature["is_list"]:
            counts_as = encoder.get("missing") or ""
            texts = [text or counts_as for text in _texts(encoder, values[:, 0])]
            return self._ids(encoder, texts)[:, None].astype(feature["dtype"])
        made = np.zeros((len(values), width), feature["dtype"])
        for row, texts in enumerate(_lists(encoder, values)):
            ids = self._ids(encoder, texts)
            ids = ids[ids != 0]
            ids = ids[-width:] if encoder.get("keep") == "last" else ids[:width]
            made[row, : len(ids)] = ids
        return made

    def _beside(self, feature: Mapping[str, Any], items: Values, given: Values | None = None) -> Values:
        """What a history holds of each known item: of the catalogue, or the numbers given beside the items."""
        rows, width = _lists(feature["items"], items), feature["width"]
        made = np.zeros((len(rows), width), feature["dtype"])
        numbers = None if given is None else _numbers_beside(feature, given, [len(texts) for texts in rows])
        if numbers is None and given is not None:
            return made
        for row, texts in enumerate(rows):
            ids = self._ids(feature["items"], texts)
            values = self.of_items[feature["name"]][ids] if numbers is None else numbers[row]
            values = values[ids != 0][-width:]
            made[row, : len(values)] = values
        return made

    def _ids(self, encoder: Mapping[str, Any], texts: Sequence[str]) -> Values:
        if encoder["kind"] == "hash":
            prints = fingerprint64_of_bytes([text.encode() for text in texts])
            present = np.array([bool(text) for text in texts], bool)
            return np.where(present, _within(prints, encoder["cardinality"]), 0)
        ids = self.ids[encoder["vocabulary"]]
        keys: Iterable[str | int | None] = map(_whole, texts) if encoder["vocabulary"] in self.whole else texts
        return np.fromiter((0 if key is None else ids.get(key, 0) for key in keys), np.int64, len(texts))


def _texts(encoder: Mapping[str, Any], values: Iterable[Any]) -> list[str]:
    """Texts as `prepare` saw them, empty where a value is missing."""
    texts = [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values]
    if encoder.get("strip"):
        texts = [text.strip() for text in texts]
    gone = set(encoder.get("missing_values", ()))
    return ["" if text in gone else text for text in texts] if gone else texts


def _lists(encoder: Mapping[str, Any], values: Values) -> list[list[str]]:
    """The values of each row's list, without empty ones: a text cut at the separator, or several columns."""
    separator = encoder.get("separator")
    rows = [_texts(encoder, row) for row in values]
    if separator is not None:
        rows = [_texts(encoder, row[0].split(separator)) for row in rows]
    return [[text for text in row if text] for row in rows]


def _numbers_beside(feature: Mapping[str, Any], values: Values, counts: Sequence[int]) -> list[Values] | None:
    """A number for each item of each row; None where the whole column is empty.

    Raises:
        ValueError: naming a row that has not as many numbers as items, or a text that is no number.
    """
    encoder = feature["encoder"]
    if values.dtype.kind == "f":
        rows = [_number(encoder, row[~np.isnan(row)]) for row in values]
    else:
        rows = [_number(encoder, _numbers({}, np.array(texts, object))) for texts in _lists(encoder, values)]
    if not any(map(len, rows)):
        return None
    for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if len(row) != count:
            name = feature["columns"][-1]
            raise ValueError(f"row {place + 1} holds {len(row)} numbers in '{name}' beside {count} items; expected one "
                             "for each, or none in any row")  # fmt: skip
    return rows


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text.partition(".")[0]) if WHOLE.fullmatch(text) else None


def _numbers(encoder: Mapping[str, Any], values: Values) -> NDArray[np.float64]:
    """Numbers, NaN where one is missing.

    Raises:
        ValueError: for a text that is no number.
    """
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    texts = [text.strip() for text in _texts(encoder, values)]
    return np.array([float(text) if text else np.nan for text in texts], np.float64)


def _transformed(encoder: Mapping[str, Any], numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = encoder.get("low"), encoder.get("high")
    beyond = np.zeros(len(numbers), bool)
    if low is not None:
        beyond |= numbers < low
    if high is not None:
        beyond |= numbers > high
    numbers = np.where(beyond, encoder.get("outside", 0.0), numbers)
    if encoder.get("missing") is not None:
        numbers = np.nan_to_num(numbers, nan=encoder["missing"])
    if encoder.get("log_plus") is not None:
        moved = numbers + encoder["log_plus"]
        return np.log(np.where(moved > 0, moved, np.nan))
    logarithm: NDArray[np.float64] = np.sign(numbers) * np.log1p(np.abs(numbers))
    return logarithm if encoder.get("log1p") else numbers


def _number(encoder: Mapping[str, Any], numbers: NDArray[np.float64]) -> Values:
    return np.nan_to_num(_transformed(encoder, numbers), nan=0.0)


def _scale(encoder: Mapping[str, Any], numbers: NDArray[np.float64]) -> Values:
    scaled: Values = (_transformed(encoder, numbers) - encoder["mean"]) / encoder["std"]
    return np.nan_to_num(scaled, nan=0.0)


def _bucket(encoder: Mapping[str, Any], numbers: NDArray[np.float64]) -> Values:
    return _place(encoder["boundaries"], numbers) + 1


_NUMBERS = {"number": _number, "scale": _scale, "bucket": _bucket}


def _cross(encoder: Mapping[str, Any], parts: Sequence[Values]) -> Values:
    prints: list[Prints] = []
    for name, values in zip(encoder["columns"], parts, strict=True):
        boundaries = encoder.get("boundaries", {}).get(name)
        if boundaries is not None:
            prints.append(_place(boundaries, _numbers(encoder, values)).astype(np.uint64))
        else:
            prints.append(fingerprint64_of_bytes([text.encode() for text in _texts(encoder, values)]))
    return _within(cross(prints), encoder["cardinality"])


def _place(boundaries: Sequence[float], numbers: NDArray[np.float64]) -> Values:
    """How many boundaries are at most as large as each number; -1 where it is missing."""
    found: Values = np.searchsorted(np.array(boundaries, np.float64), numbers, side="right")
    return np.where(np.isnan(numbers), -1, found)


def _within(prints: Prints, cardinality: int) -> Values:
    return 1 + (prints % np.uint64(cardinality - 1)).astype(np.int64)


class TritonPythonModel:
    """What Triton's Python backend calls."""

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
