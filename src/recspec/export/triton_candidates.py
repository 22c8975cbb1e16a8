"""The candidates of a pipeline for one request, as a Triton Python model that needs numpy alone.

`recspec export PIPELINE --format triton` copies this file as `model.py` beside `merging.py`. `candidates.json` names
the tensors; `arrays` holds the vectors of items, who has seen what, and the items' features, mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recspec.inference import merging

CANDIDATES_FILE, ARRAYS = "candidates.json", "arrays"
USER = "user"
"""The input of the user's number, beside `found_0`, `found_1` and so on of the retrievers."""
CANDIDATE, BROUGHT_BY = "candidate", "brought_by"
"""Outputs beside the items' features: their numbers, and the bits of the retrievers that brought them."""


class Finding:
    """What brings candidates, in numpy."""

    def __init__(self, described: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.inputs = [USER, *(f"found_{place}" for place in range(len(described["retrievers"])))]
        self._described, self._arrays = described, arrays

    @classmethod
    def load(cls, folder: Path) -> Finding:
        """Read `candidates.json` and the arrays beside it."""
        described = json.loads((folder / CANDIDATES_FILE).read_text(encoding="utf-8"))
        files = sorted((folder / ARRAYS).glob("*.npy"))
        return cls(described, {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files})

    def outputs(self, given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
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

    def candidates(self, user: int, found: Sequence[NDArray[Any]]) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
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


class TritonPythonModel:
    """The interface that Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the arrays of this version."""
        assert int(np.__version__.split(".")[0]) < 2, "this server's Python backend corrupts tensors of numpy 2"
        self.finding = Finding.load(Path(args["model_repository"]) / args["model_version"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request; one that can't be answered is its own error alone."""
        import triton_python_backend_utils as pb

        answers = []
        for request in requests:
            try:
                given = {name: pb.get_input_tensor_by_name(request, name).as_numpy() for name in self.finding.inputs}
                outputs = [
                    pb.Tensor(name, np.ascontiguousarray(each)) for name, each in self.finding.outputs(given).items()
                ]
                answers.append(pb.InferenceResponse(output_tensors=outputs))
            except ValueError as error:
                answers.append(pb.InferenceResponse(error=pb.TritonError(f"candidates: {error}")))
        return answers
