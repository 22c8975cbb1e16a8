"""An ONNX program as a Triton Python model, for a server that has no ONNX Runtime backend.

`recspec export --format triton --triton-backend python` writes this file as `model.py` beside `model.onnx`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class TritonPythonModel:
    """What Triton's Python backend calls: requests that wait together are computed together."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the program of this version."""
        import onnxruntime

        assert int(np.__version__.split(".")[0]) < 2, "this server's Python backend corrupts tensors of numpy 2"
        config = json.loads(args["model_config"])
        self.batches = config.get("max_batch_size", 0) > 0
        self.inputs = [each["name"] for each in config["input"]]
        self.outputs = [each["name"] for each in config["output"]]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        threads = config.get("parameters", {}).get("threads", {}).get("string_value")
        if threads:
            options.intra_op_num_threads = int(threads)
        file = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests, one product for all of them where they may be joined."""
        import triton_python_backend_utils as pb

        given = [[pb.get_input_tensor_by_name(each, name).as_numpy() for name in self.inputs] for each in requests]
        groups = [list(range(len(given)))] if self.batches else [[place] for place in range(len(given))]
        answers: list[Any] = [None] * len(given)
        for group in groups:
            joined = [np.concatenate([given[place][at] for place in group]) for at in range(len(self.inputs))]
            try:
                made = self.session.run(self.outputs, dict(zip(self.inputs, joined, strict=True)))
            except Exception as error:  # the runtime's own kinds have no common base but this
                for place in group:
                    answers[place] = pb.InferenceResponse(error=pb.TritonError(str(error)))
                continue
            ends = np.cumsum([len(given[place][0]) for place in group]).tolist() if self.batches else [None]
            for place, start, end in zip(group, [0, *ends[:-1]], ends, strict=True):
                outputs = [pb.Tensor(name, each[start:end]) for name, each in zip(self.outputs, made, strict=True)]
                answers[place] = pb.InferenceResponse(output_tensors=outputs)
        return answers
