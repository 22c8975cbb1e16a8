"""A pipeline in a Triton repository: an ensemble from the raw values of a request to the best items.

NAME_request            raw values in, features of the request out (Python backend, numpy alone)
NAME_RETRIEVER          features in, a vector or the scores of all items out: a program for each retriever
NAME_candidates         the candidates and their features (Python backend, numpy alone)
NAME                    the ranker, which `exporter` writes
NAME_best               the candidates in order, as raw items (Python backend, numpy alone)
NAME_recommend          all of them, one after the other
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recspec.base.errors import ExportError, require_extra
from recspec.bundle import Bundle
from recspec.export import onnx_graph, triton_model
from recspec.export import triton_repository as repository
from recspec.export.exported_model import TYPES, OnnxModel, as_inputs, as_model_batch, known_ids, unused_prefix
from recspec.export.triton_repository import Backend, Staged
from recspec.feature_spec import FeatureSpec, Port, Signature, signature_of
from recspec.inference import Pipeline, Predictor, has_vectors, item_vectors
from recspec.models import ItemModel, Model
from recspec.models.layers import Batch

LARGEST_ERROR = 1e-4
"""Of a retriever's answers, relative to the largest of them."""

FOUND = "found"
"""A retriever's output."""
ITEM = "item."
"""Before the name of an item's feature, among the answers of `NAME_candidates`."""


class Query(nn.Module):
    """A retriever's answer to one request: its vector (1, d), or its scores (1, N) of `items`."""

    def __init__(self, model: Model, inputs: Sequence[Port], items: Batch) -> None:
        super().__init__()
        self.model, self.ports, self.items = model, inputs, items

    def forward(self, *inputs: Tensor) -> Tensor:
        batch = as_model_batch(known_ids(dict(zip(self.ports, inputs, strict=True)))[0])
        model: Any = self.model
        if not has_vectors(model):
            return cast(Tensor, model.score_items(batch, self.items)).float()
        of = batch[model.user_id].long() if isinstance(model, ItemModel) else batch
        return cast(Tensor, model.request_vector(of)).float()


TAKEN = ("raw", "encode", "request", "candidates", "best", "recommend")
"""What follows NAME_ in the names of models that are no retriever's."""


def write_pipeline(trained: Bundle, staged: Staged, name: str, ranker: Signature, backend: Backend) -> str:
    """Write everything but the ranker; returns the ensemble's name.

    Raises:
        ExportError: if the ranker is no program of the form ranker, or a part can't be exported.
    """
    if ranker.form != "ranker":
        raise ExportError("a pipeline needs a program that reads a request once; take --form ranker")
    predictor = Predictor(trained, torch.device("cpu"))
    if predictor.encoders is None or predictor.pipeline is None:
        raise ExportError("the dataset was not prepared by recspec, so raw values can't be encoded")
    written = _Pipeline(staged, name, ranker, predictor, predictor.pipeline)
    queries = written.retrievers(backend)
    written.candidates()
    written.best()
    return written.ensemble(queries)


@dataclass(frozen=True)
class _Pipeline:
    """The models of a pipeline in a repository. Tensors of the ensemble have a prefix, so that any feature fits."""

    staged: Staged
    name: str
    ranker: Signature
    predictor: Predictor
    pipeline: Pipeline

    @property
    def _scores(self) -> tuple[Port, ...]:
        return tuple(Port(name, "float32", 1, "item") for name in self.ranker.outputs)

    @property
    def _answers(self) -> tuple[Port, ...]:
        return *_NAMED, *self._scores

    def retrievers(self, backend: Backend) -> dict[str, tuple[Port, ...]]:
        """Write a program for each retriever; returns what each reads of a request."""
        items, made = self.predictor.catalogues.items, dict[str, tuple[Port, ...]]()
        for each in self.pipeline.retrievers:
            if each.name in TAKEN:
                raise ExportError(
                    f"a retriever is called '{each.name}', as a part of the ensemble; build the pipeline "
                    "anew with NAME=RUN"
                )
            model, own = each.model.eval(), f"{self.name}_{each.name}"
            of_items = set(self.predictor.spec.role("item"))
            made[own] = _ports(self.predictor.spec, [name for name in model.features() if name not in of_items])
            to = self.staged.write_program(own, made[own], (_found(FOUND),), backend)
            _write_query(to, Query(model, made[own], items.features))
        return made

    def candidates(self) -> None:
        """Write the model that joins what the retrievers bring."""
        known, seen = self.predictor.catalogues.items, self.predictor.bundle.seen
        assert seen is not None
        described, arrays = list[dict[str, object]](), dict[str, NDArray[Any]]()
        for place, each in enumerate(self.pipeline.retrievers):
            kept = self.pipeline.kept
            arrays[f"may_bring_{place}"] = each.found if kept is None else each.found & kept
            vectors = f"vectors_{place}" if has_vectors(each.model) else None
            if vectors is not None:
                arrays[vectors] = item_vectors(each.model, known.features)
            described.append({"name": each.name, "needs_user": isinstance(each.model, ItemModel), "vectors": vectors})
        arrays["seen_offsets"], arrays["seen_items"] = (each.numpy() for each in seen.lists)
        arrays["popular"] = self.pipeline.most_popular(self.pipeline.kept, len(known) + known.first_id)
        features = self.ranker.of_level("item")
        held = as_inputs(known.features, Signature("ranker", features))
        arrays |= {f"feature_{place}": held[port.name] for place, port in enumerate(features)}
        found = (*_FOUND, *(replace(port, name=f"{ITEM}{port.name}") for port in features))
        to = self.staged.write_python(f"{self.name}_candidates", self._given, found)
        text = {
            "first_user": self.predictor.catalogues.users.first_id,
            "count": self.pipeline.card.candidates,
            "retrievers": described,
            "features": [port.name for port in found[len(_FOUND) :]],
        }
        _write_json(to / triton_model.CANDIDATES_FILE, text)
        (to / triton_model.ARRAYS).mkdir()
        for key, array in arrays.items():
            np.save(to / triton_model.ARRAYS / f"{key}.npy", np.ascontiguousarray(array), allow_pickle=False)

    def best(self) -> None:
        """Write the model that puts the candidates in order."""
        items, count = self.predictor.catalogues.items, len(self.pipeline.retrievers)
        ids = np.arange(items.first_id, items.first_id + len(items))
        text = {
            "first": items.first_id,
            "items": self.predictor.catalogues.raw_ids("item", ids).to_pylist(),
            "sources": self.pipeline.names_of((1 << count + 1) - 1),
            "scores": self.ranker.outputs,
        }
        to = self.staged.write_python(f"{self.name}_best", (*_FOUND, *self._scores), self._answers)
        _write_json(to / triton_model.BEST_FILE, text)

    def ensemble(self, queries: Mapping[str, Sequence[Port]]) -> str:
        """Write the encoders of a request, and the ensemble of all models."""
        spec, encoders, step = self.predictor.spec, self.predictor.encoders, repository.step
        assert encoders is not None
        asked = {port.name: port for each in (self.ranker.of_level("request"), *queries.values()) for port in each}
        asked |= {port.name: port for port in _ports(spec, [spec.user_id])}
        signature = Signature("ranker", tuple(asked.values()))
        beside = repository.histories_beside(spec, list(asked))
        to, batching = f"{self.name}_request", repository.Batching()
        columns = self.staged.write_encode(to, signature, encoders, batching, beside)
        repository.refuse_answer_names(columns, self._answers)
        prefix = unused_prefix(port.name for port in columns)
        of_request = {each: f"{prefix}feature.{each}" for each in asked}
        found = {port.name: f"{prefix}candidate.{port.name}" for port in _FOUND}
        scored = {port.name: f"{prefix}scored.{port.name}" for port in self._scores}
        answers = [f"{prefix}{FOUND}.{place}" for place in range(len(queries))]
        items = {port.name: f"{prefix}{ITEM}{port.name}" for port in self.ranker.of_level("item")}
        steps = [step(to, {port.name: port.name for port in columns}, of_request)]
        for answer, (name, ports) in zip(answers, queries.items(), strict=True):
            steps.append(step(name, {port.name: of_request[port.name] for port in ports}, {FOUND: answer}))
        given = {port.name: answer for port, answer in zip(self._given[1:], answers, strict=True)}
        given[triton_model.USER] = of_request[spec.user_id]
        brought = {f"{ITEM}{name}": inner for name, inner in items.items()}
        steps.append(step(f"{self.name}_candidates", given, {**found, **brought}))
        read = {port.name: {**items, **of_request}[port.name] for port in self.ranker.inputs}
        steps.append(step(self.name, read, scored))
        steps.append(step(f"{self.name}_best", {**found, **scored}, {port.name: port.name for port in self._answers}))
        self.staged.write_ensemble(f"{self.name}_recommend", columns, self._answers, steps)
        return f"{self.name}_recommend"

    @property
    def _given(self) -> tuple[Port, ...]:
        """What the candidates are made from: the user's number, and each retriever's answer."""
        spec = self.predictor.spec
        (user,) = (replace(port, name=triton_model.USER) for port in _ports(spec, [spec.user_id]))
        return user, *(_found(f"{FOUND}_{place}") for place in range(len(self.pipeline.retrievers)))


def _found(name: str) -> Port:
    """A retriever's answer: numbers of a vector, or a score for each item."""
    return Port(name, "float32", -1, "request")


_FOUND = (Port(triton_model.CANDIDATE, "int64", 1, "item"), Port(triton_model.BROUGHT_BY, "int32", 1, "item"))
_NAMED = tuple(Port(name, "string", 1, "item") for name in (triton_model.ITEM, triton_model.RETRIEVED_BY))


def _write_json(file: Path, content: Mapping[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _ports(spec: FeatureSpec, names: Sequence[str]) -> tuple[Port, ...]:
    return tuple(replace(port, level="request") for port in signature_of(spec, names, "rows").inputs)


def _write_query(to: Path, query: Query) -> None:
    """Write a retriever's program, and compare it with its model on some requests."""
    generator = torch.Generator().manual_seed(0)
    signature = Signature("ranker", tuple(query.ports))
    examples = [[_drawn(port, generator) for port in query.ports] for _ in range(4)]
    graph = onnx_graph.to_onnx(onnx_graph.trace(query.eval(), signature, examples[0]), signature, (FOUND,))
    onnx_graph.save(graph, str(to / OnnxModel.file))
    runtime = require_extra("onnxruntime", "onnx")
    session = runtime.InferenceSession(str(to / OnnxModel.file), providers=["CPUExecutionProvider"])
    for example in examples:
        with torch.inference_mode():
            expected = query(*example).numpy()
        given = {port.name: each.numpy() for port, each in zip(query.ports, example, strict=True)}
        error = np.abs(session.run([FOUND], given)[0] - expected).max() / max(1.0, np.abs(expected).max())
        if not error <= LARGEST_ERROR:
            raise ExportError(
                f"{to.parent.name}: the program's answers differ from the retriever's by {error:.2g} of the largest"
            )


def _drawn(port: Port, generator: torch.Generator) -> Tensor:
    shape = (1, port.width)
    if port.num_ids is None:
        return torch.rand(shape, generator=generator)
    return torch.randint(0, port.num_ids, shape, generator=generator, dtype=TYPES[port.dtype])
