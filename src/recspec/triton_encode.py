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
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
"""Python's float takes more, such as `1_000` and digits of other scripts."""
MISSING_NUMBERS = ("n/a", "na", "#n/a", "null", "none", "nan", "-", "?", "\\n")
TRUTH = {"true": 1, "false": 0}
"""As in `recspec.encoding`."""


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
        texts, counts = _lists(encoder, values)
        ids = self._ids(encoder, texts)
        return _laid(ids, ids != 0, counts, width, encoder.get("keep", "first")).astype(feature["dtype"])

    def _beside(self, feature: Mapping[str, Any], items: Values, given: Values | None = None) -> Values:
        """What a history holds of each known item: of the catalogue, or the numbers given beside the items."""
        texts, counts = _lists(feature["items"], items)
        ids = self._ids(feature["items"], texts)
        values = self.of_items[feature["name"]][ids] if given is None else _numbers_beside(feature, given, counts)
        return _laid(values, ids != 0, counts, feature["width"], "last").astype(feature["dtype"])

    def _ids(self, encoder: Mapping[str, Any], texts: Sequence[str]) -> Values:
        if encoder["kind"] == "hash":
            texts = _digits(texts) if encoder.get("whole") else texts
            present = np.array([bool(text) for text in texts], bool)
            return np.where(present, _hashed(texts, encoder["cardinality"]), 0)
        known, whole = self.ids[encoder["vocabulary"]], encoder["vocabulary"] in self.whole
        keys: Iterable[str | int | None] = map(_whole, texts) if whole else texts
        ids = np.fromiter((0 if key is None else known.get(key, 0) for key in keys), np.int64, len(texts))
        if encoder.get("buckets") or encoder.get("otherwise"):
            texts = _digits(texts) if whole else texts
            beyond = [row for row, text in enumerate(texts) if text and not ids[row]]
            ids[beyond] = encoder["otherwise"]
            if encoder["buckets"]:
                ids[beyond] = len(known) + _hashed([texts[row] for row in beyond], encoder["buckets"] + 1)
        return ids


def _texts(encoder: Mapping[str, Any], values: Iterable[Any]) -> list[str]:
    """Texts as `prepare` saw them, empty where a value is missing."""
    texts = [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values]
    if encoder.get("strip"):
        texts = [text.strip() for text in texts]
    gone = set(encoder.get("missing_values", ()))
    return ["" if text in gone else text for text in texts] if gone else texts


def _lists(encoder: Mapping[str, Any], values: Values) -> tuple[list[str], NDArray[np.int64]]:
    """The values of all rows' lists, and how many each row has, without empty ones.

    A list is a text cut at the separator, or several columns.
    """
    separator = encoder.get("separator")
    texts = _texts(encoder, values.ravel())
    counts = np.full(len(values), values.shape[1])
    if separator is not None:
        parts = [text.split(separator) for text in texts]
        counts = np.array([len(part) for part in parts], np.int64)
        texts = _texts(encoder, [text for part in parts for text in part])
    given = np.array([bool(text) for text in texts], bool)
    owners = np.repeat(np.arange(len(values)), counts)[given]
    return [text for text in texts if text], np.bincount(owners, minlength=len(values))


def _laid(values: Values, known: NDArray[np.bool_], counts: NDArray[np.int64], width: int, keep: str) -> Values:
    """Values (T,) of rows of so many (B,) -> (B, width): the known ones, the first or the last, and 0 behind them."""
    rows = np.repeat(np.arange(len(counts)), counts)[known]
    counts = np.bincount(rows, minlength=len(counts))
    places = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    if keep == "last":
        places -= np.maximum(counts - width, 0)[rows]
    kept = (places >= 0) & (places < width)
    made = np.zeros((len(counts), width), values.dtype)
    made[rows[kept], places[kept]] = values[known][kept]
    return made


def _numbers_beside(feature: Mapping[str, Any], values: Values, counts: NDArray[np.int64]) -> Values:
    """A number for each item of each row (T,), 0 for all where the whole column is empty.

    Raises:
        ValueError: naming a row that has not as many numbers as items, or a text that is no number.
    """
    encoder = feature["encoder"]
    if values.dtype.kind == "f":
        own, numbers = (~np.isnan(values)).sum(axis=1), values[~np.isnan(values)]
    else:
        texts, own = _lists(encoder, values)
        numbers = _numbers({}, np.array(texts, object))
    if not len(numbers):
        return np.zeros(counts.sum())
    wrong = np.flatnonzero(own != counts)
    if len(wrong):
        row, name = wrong[0], feature["columns"][-1]
        raise ValueError(f"row {row + 1} holds {own[row]} numbers in '{name}' beside {counts[row]} items; expected one "
                         "for each, or none in any row")  # fmt: skip
    return _number(encoder, numbers)


def _whole(text: str) -> int | None:
    text = text.strip()
    if text.lower() in TRUTH:
        return TRUTH[text.lower()]
    return int(text.partition(".")[0]) if WHOLE.fullmatch(text) else None


def _digits(texts: Sequence[str]) -> list[str]:
    """Whole numbers as their decimal digits, empty where a text is none."""
    return ["" if number is None else str(number) for number in map(_whole, texts)]


def _numbers(encoder: Mapping[str, Any], values: Values) -> NDArray[np.float64]:
    """Numbers, NaN where one is missing.

    Raises:
        ValueError: for a text that is no number, and an infinite one.
    """
    if values.dtype.kind == "f":
        gone = [int(text) for text in encoder.get("missing_values", ()) if re.fullmatch("-?[0-9]{1,18}", text)]
        numbers = np.where(np.isin(values, gone), np.nan, values.astype(np.float64))
    else:
        numbers = np.array([_float(text.strip()) for text in _texts(encoder, values)], np.float64)
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise ValueError(f"row {infinite[0] + 1} is infinite; expected a finite number")
    return numbers


def _float(text: str) -> float:
    word = text.lower()
    if not text or word in MISSING_NUMBERS:
        return np.nan
    if word in TRUTH:
        return TRUTH[word]
    if NUMBER.fullmatch(text):
        return float(text)
    raise ValueError(f"{text[:60]!r} is no number; expected such as 1.5")


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
    lacks = np.zeros(len(parts[0]), bool)
    for name, values in zip(encoder["columns"], parts, strict=True):
        boundaries = encoder.get("boundaries", {}).get(name)
        if boundaries is not None:
            numbers = _numbers(encoder, values)
            prints.append(_place(boundaries, numbers).astype(np.uint64))
            lacks |= np.isnan(numbers)
            continue
        texts = _texts(encoder, values)
        if name in encoder.get("whole", ()):
            whole = [_whole(text) for text in texts]
            prints.append(np.array([-1 if each is None else each for each in whole], np.int64).astype(np.uint64))
            lacks |= np.array([each is None for each in whole], bool)
        else:  # an empty text is one, as TensorFlow takes it: a tensor has no other way to lack it
            prints.append(fingerprint64_of_bytes([text.encode() for text in texts]))
    ids = _within(cross(prints), encoder["cardinality"])
    return np.where(lacks, 0, ids) if encoder.get("needs_all") else ids


def _place(boundaries: Sequence[float], numbers: NDArray[np.float64]) -> Values:
    """How many boundaries are at most as large as each number; -1 where it is missing."""
    found: Values = np.searchsorted(np.array(boundaries, np.float64), numbers, side="right")
    return np.where(np.isnan(numbers), -1, found)


def _hashed(texts: Sequence[str], cardinality: int) -> Values:
    return _within(fingerprint64_of_bytes([text.encode() for text in texts]), cardinality)


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
