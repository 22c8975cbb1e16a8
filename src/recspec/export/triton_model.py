"""What Triton's Python backend runs of recspec; all but an ONNX program needs numpy alone.

`recspec export --format triton` copies this file as `model.py`, beside the files that it imports. A version's folder
tells by its files which model it is:

encode.json      raw values to a model's inputs. `vocabularies` and `of_texts` hold what `prepare` fitted; `of_items`
                 holds the values of the item catalogue that belong to the events of a history, by the item's id.
candidates.json  the candidates of a pipeline for one request. `arrays` holds the vectors of items, who has seen what,
                 and the items' features, mapped into memory.
best.json        the ranker's scores of candidates as a list of raw items
model.onnx       an ONNX program, for a server that has no ONNX Runtime backend
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
from recspec.inference import merging

Values = NDArray[Any]
ENCODE_FILE, OF_ITEMS, OF_TEXTS = "encode.json", "of_items", "of_texts"
CANDIDATES_FILE, ARRAYS = "candidates.json", "arrays"
BEST_FILE, PROGRAM_FILE = "best.json", "model.onnx"
USER = "user"
"""The input of the user's number, beside `found_0`, `found_1` and so on of the retrievers."""
CANDIDATE, BROUGHT_BY = "candidate", "brought_by"
"""Outputs beside the items' features: their numbers, and the bits of the retrievers that brought them."""
ITEM, RETRIEVED_BY = "item", "retrieved_by"


class TritonPythonModel:
    """The interface that Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the files of this version."""
        assert int(np.__version__.split(".")[0]) < 2, "this server's Python backend corrupts tensors of numpy 2"
        folder = Path(args["model_repository"]) / args["model_version"]
        self.model: Encoding | Finding | Best | Program
        if (folder / PROGRAM_FILE).is_file():
            self.model = Program(folder / PROGRAM_FILE, json.loads(args["model_config"]))
        else:
            kinds: dict[str, Any] = {ENCODE_FILE: Encoding, CANDIDATES_FILE: Finding, BEST_FILE: Best}
            self.model = next(kind.load(folder) for file, kind in kinds.items() if (folder / file).is_file())

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, together where they may be joined; one that can't be answered is its own error alone."""
        import triton_python_backend_utils as pb

        model, answers = self.model, list[Any]()
        given = [
            {name: pb.get_input_tensor_by_name(each, name).as_numpy() for name in model.inputs} for each in requests
        ]
        for group in [given] if model.joins_requests else [[each] for each in given]:
            joined = {name: np.concatenate([each[name] for each in group]) for name in model.inputs}
            try:
                made = model.outputs(joined)
            except model.errors as error:
                answers += [pb.InferenceResponse(error=pb.TritonError(f"{model.about}{error}")) for _ in group]
                continue
            ends = (
                np.cumsum([len(each[model.inputs[0]]) for each in group]).tolist() if model.joins_requests else [None]
            )
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                parts = {name: np.ascontiguousarray(each[start:end]) for name, each in made.items()}
                tensors = [pb.Tensor(name, each) for name, each in parts.items()]
                answers.append(pb.InferenceResponse(output_tensors=tensors))
        return answers


class Program:
    """An ONNX program under ONNX Runtime; requests that wait together are computed together."""

    about, errors = "", Exception  # the runtime's own kinds have no common base but this

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        import onnxruntime

        self.joins_requests = config.get("max_batch_size", 0) > 0
        self.inputs = [each["name"] for each in config["input"]]
        self._outputs = [each["name"] for each in config["output"]]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        threads = config.get("parameters", {}).get("threads", {}).get("string_value")
        if threads:
            options.intra_op_num_threads = int(threads)
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def outputs(self, given: Mapping[str, Values]) -> dict[str, Values]:
        """The program's outputs."""
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(given)), strict=True))


class Encoding:
    """The features of `encode.json`, the vocabularies, and for some histories a value of each item."""

    about, errors, joins_requests = "raw values: ", ValueError, False

    def __init__(
        self,
        described: Mapping[str, Any],
        vocabularies: Mapping[str, Sequence[str | int]],
        of_items: Mapping[str, Values] | None = None,
        of_texts: Mapping[str, text_vectors.TextProjection] | None = None,
    ) -> None:
        self.columns: list[dict[str, Any]] = described["columns"]
        self.inputs = [each["name"] for each in self.columns]
        parts: dict[str, Any] = {"encoder": {}, "items": None}
        self._features = [
            SimpleNamespace(**{**each, **{key: _settings(each.get(key, default)) for key, default in parts.items()}})
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

    def outputs(self, columns: Mapping[str, Values]) -> dict[str, Values]:
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
        if encoder.kind == "clock":
            return raw_values.clock_ids(encoder, _texts(values[:, 0]))[:, None]
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


def _settings(values: Mapping[str, Any] | None) -> SimpleNamespace | None:
    return None if values is None else SimpleNamespace(**values)


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


class Finding:
    """What brings candidates, in numpy."""

    about, errors, joins_requests = "candidates: ", ValueError, False

    def __init__(self, described: Mapping[str, Any], arrays: Mapping[str, Values]) -> None:
        self.inputs = [USER, *(f"found_{place}" for place in range(len(described["retrievers"])))]
        self._described, self._arrays = described, arrays

    @classmethod
    def load(cls, folder: Path) -> Finding:
        """Read `candidates.json` and the arrays beside it."""
        described = json.loads((folder / CANDIDATES_FILE).read_text(encoding="utf-8"))
        files = sorted((folder / ARRAYS).glob("*.npy"))
        return cls(described, {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files})

    def outputs(self, given: Mapping[str, Values]) -> dict[str, Values]:
        """The candidates (C, 1), their bits (C, 1) and features (C, width) of a request's user and queries.

        Raises:
            ValueError: if a filter leaves no item, or a score is not finite.
        """
        ids, bits = self.candidates(int(given[USER][0, 0]), [given[name] for name in self.inputs[1:]])
        if not len(ids):
            raise ValueError("no item is left: the user has seen all that the pipeline's filter keeps")
        names = self._described["features"]
        features = {name: self._arrays[f"feature_{place}"][ids] for place, name in enumerate(names)}
        return {CANDIDATE: ids[:, None], BROUGHT_BY: bits.astype(np.int32)[:, None], **features}

    def candidates(self, user: int, found: Sequence[Values]) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
        """Ids (C,) and bits (C,) for a user's number, from a vector (1, d) or all scores (1, N) of each retriever."""
        starts, count = self._arrays["seen_offsets"], self._described["count"]
        known = self._described["first_user"] <= user < len(starts) - 1
        seen = self._arrays["seen_items"][starts[user] : starts[user + 1]] if known else ()
        hidden = np.asarray(seen, np.int64)
        lists = []
        for place, (each, query) in enumerate(zip(self._described["retrievers"], found, strict=True)):
            if each["needs_user"] and not known:
                lists.append(np.zeros(0, np.int64))
                continue
            vectors = each["vectors"]
            with np.errstate(invalid="ignore"):  # OpenBLAS may say so of lanes that it drops; the next lines look
                scores = np.array(query[0] if vectors is None else self._arrays[vectors] @ query[0])
            if not np.isfinite(scores).all():
                raise ValueError(f"retriever {each['name']}: gives no finite score for some items; train it again")
            scores[~self._arrays[f"may_bring_{place}"]] = -np.inf
            scores[hidden] = -np.inf
            lists.append(merging.best(scores, count, ties=vectors is not None))
        popular = self._arrays["popular"][: count + len(hidden)]
        return merging.joined(lists, np.asarray(popular), count, hidden)


class Best:
    """Orders candidates and names them."""

    about, errors, joins_requests = "the best items: ", ValueError, False

    def __init__(self, first: int, items: Sequence[str | int], sources: Sequence[str], scores: Sequence[str]) -> None:
        self.inputs, self._scores = [CANDIDATE, BROUGHT_BY, *scores], tuple(scores)
        self._first, self._items = first, np.array([str(each).encode() for each in items], object)
        self._sources = sources

    @classmethod
    def load(cls, folder: Path) -> Best:
        """Read `best.json`."""
        return cls(**json.loads((folder / BEST_FILE).read_text(encoding="utf-8")))

    def outputs(self, given: Mapping[str, Values]) -> dict[str, Values]:
        """Raw items, retrievers' names, and the ranker's outputs (C, 1), best first, equal ones by id.

        Raises:
            ValueError: if a score is not finite.
        """
        ids, bits, squeezed, logits = (given[name][:, 0] for name in self.inputs)
        if not np.isfinite(logits).all():
            raise ValueError("the ranker gives no finite score for some items; train it again")
        order = np.lexsort((ids, -logits))
        named = {bit: self._named(bit) for bit in np.unique(bits).tolist()}
        sources = np.array([named[bit] for bit in bits[order].tolist()], object)
        made = (self._items[ids[order] - self._first], sources, squeezed[order], logits[order])
        return {name: each[:, None] for name, each in zip((ITEM, RETRIEVED_BY, *self._scores), made, strict=True)}

    def _named(self, bits: int) -> bytes:
        return ",".join(name for place, name in enumerate(self._sources) if bits >> place & 1).encode()
