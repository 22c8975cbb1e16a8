"""The ranker's scores of candidates as a list of raw items, as a Triton Python model that needs numpy alone.

`recspec export PIPELINE --format triton` copies this file as `model.py`; `best.json` holds the raw ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BEST_FILE = "best.json"
GIVEN = ("candidate", "brought_by")
ITEM, RETRIEVED_BY = "item", "retrieved_by"


class Best:
    """Orders candidates and names them."""

    def __init__(self, first: int, items: Sequence[str | int], sources: Sequence[str], scores: Sequence[str]) -> None:
        self.given, self._scores = (*GIVEN, *scores), tuple(scores)
        self._first, self._items = first, np.array([str(each).encode() for each in items], object)
        self._sources = sources

    @classmethod
    def load(cls, folder: Path) -> Best:
        """Read `best.json`."""
        return cls(**json.loads((folder / BEST_FILE).read_text(encoding="utf-8")))

    def outputs(self, given: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Raw items, retrievers' names, and the ranker's outputs (C, 1), best first, equal ones by id.

        Raises:
            ValueError: if a score is not finite.
        """
        ids, bits, squeezed, logits = (given[name][:, 0] for name in self.given)
        if not np.isfinite(logits).all():
            raise ValueError("the ranker gives no finite score for some items; train it again")
        order = np.lexsort((ids, -logits))
        named = {bit: self._named(bit) for bit in np.unique(bits).tolist()}
        sources = np.array([named[bit] for bit in bits[order].tolist()], object)
        made = (self._items[ids[order] - self._first], sources, squeezed[order], logits[order])
        return {name: each[:, None] for name, each in zip((ITEM, RETRIEVED_BY, *self._scores), made, strict=True)}

    def _named(self, bits: int) -> bytes:
        return ",".join(name for place, name in enumerate(self._sources) if bits >> place & 1).encode()


class TritonPythonModel:
    """The interface that Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the raw ids of this version."""
        assert int(np.__version__.split(".")[0]) < 2, "this server's Python backend corrupts tensors of numpy 2"
        self.best = Best.load(Path(args["model_repository"]) / args["model_version"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request; one that can't be answered is its own error alone."""
        import triton_python_backend_utils as pb

        answers = []
        for request in requests:
            try:
                given = {name: pb.get_input_tensor_by_name(request, name).as_numpy() for name in self.best.given}
                outputs = [pb.Tensor(name, each) for name, each in self.best.outputs(given).items()]
                answers.append(pb.InferenceResponse(output_tensors=outputs))
            except ValueError as error:
                answers.append(pb.InferenceResponse(error=pb.TritonError(f"the best items: {error}")))
        return answers
