"""Metadata, configuration and statistics of models, as the Open Inference Protocol and its extensions define them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recspec import __version__
from recspec.export import TYPES
from recspec.serving.repository import Form, Repository
from recspec.serving.tensors import DATATYPES

SERVER = {
    "name": "recspec",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_repository", "model_configuration", "statistics"],
}
"""The protocol's server metadata."""


def metadata(repository: Repository, form: Form) -> dict[str, Any]:
    """The protocol's model metadata: names, datatypes and shapes with the batch first."""
    return {
        "name": form.name,
        "versions": list(repository.versions(form.name)),
        "platform": form.model.opened.platform,
        "inputs": [
            {"name": port.name, "datatype": DATATYPES[port.dtype], "shape": [-1, port.width]} for port in form.inputs
        ],
        "outputs": [
            {"name": name, "datatype": "FP32", "shape": [-1, 1]} for name in form.model.opened.signature.outputs
        ],
    }


def configuration(repository: Repository, form: Form) -> dict[str, Any]:
    """The model configuration for Triton's clients, with the shapes of one row."""
    return {
        "name": form.name,
        "platform": form.model.opened.platform,
        "backend": "recspec",
        "version_policy": {"specific": {"versions": [int(each) for each in repository.versions(form.name)]}},
        "max_batch_size": repository.limits.max_rows,
        "input": [{"name": port.name, "data_type": TYPES[port.dtype], "dims": [port.width]} for port in form.inputs],
        "output": [
            {"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in form.model.opened.signature.outputs
        ],
        "dynamic_batching": {
            "preferred_batch_size": [repository.limits.max_batch_rows],
            "max_queue_delay_microseconds": round(1000 * repository.limits.max_delay_ms),
        },
        "instance_group": [
            {"name": form.name, "kind": "KIND_CPU" if repository.settings.device == "cpu" else "KIND_AUTO", "count": 1}
        ],
    }


def statistics(forms: Sequence[Form]) -> dict[str, Any]:
    """The protocol's statistics; both forms of a model share them."""
    found = []
    for form in forms:
        counts = asdict(form.model.batcher.statistics)
        sizes = [{"batch_size": rows, **parts} for rows, parts in sorted(counts.pop("by_rows").items())]
        head = {"name": form.name, "version": form.model.version}
        found.append({**head, **counts, "batch_stats": sizes, "memory_usage": []})
    return {"model_stats": found}
