"""Trained models put together: a blend of scores, or a pipeline of retrievers and a ranker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recspec.api.data import Data, load_spec
from recspec.api.evaluating import kind_of_object
from recspec.api.model import Model
from recspec.api.progress import Stages, stages
from recspec.api.verbs import Place, verb
from recspec.base.errors import SettingsError

if TYPE_CHECKING:
    from recspec.inference import Built
    from recspec.training import Blended


class BlendedModel(Model):
    """A blend of models. `blended` says how its weights were chosen."""

    blended: Blended


class PipelineModel(Model):
    """Retrievers and a ranker in one bundle. `built` says what each retriever may bring."""

    built: Built


@verb
def blend(
    out: Place,
    runs: Sequence[Place],
    data: Place | None = None,
    *,
    like: Place | None = None,
    metric: str = "full/ndcg@10",
    device: str = "cpu",
    allow_outside: bool = False,
    progress: bool | Stages | None = None,
) -> BlendedModel:
    """Blend models that rank items: a bundle of the weighted sum of their scores, with weights chosen on valid.

    Args:
        out: Folder of the new run.
        runs: Models, runs or bundles trained on the same dataset.
        data: Prepared dataset, whose split valid chooses the weights.
        like: Another blend of the same models: take its forms and weights, and choose nothing.
        metric: PROTOCOL/METRIC that chooses the weights.
        device: auto, cpu, cuda or cuda:N.
        allow_outside: Allow files outside the specification's folder.
        progress: A function that receives stages (stage, done, total), or False for no bar.

    Raises:
        SettingsError: unless exactly one of `data` and `like` is given.
        BundleError: for models that can't be blended.
    """
    from recspec.loading import pick_device
    from recspec.training import blend_runs

    if (data is None) == (like is None):
        raise SettingsError("pipeline blend: give --data DATA to choose weights on its valid, or --like BLEND")
    spec = load_spec(data, allow_outside=allow_outside) if data is not None else None
    with stages(progress) as show:
        made = blend_runs(
            Path(out),
            [Path(run) for run in runs],
            spec=spec,
            like=None if like is None else Path(like),
            metric=metric,
            device=pick_device(device),
            progress=show,
        )
    opened = data if isinstance(data, Data) else None if spec is None else Data(spec)
    model = BlendedModel(out, device=device, kind=kind_of_object(data), data=opened)
    model.blended = made
    return model


@verb
def pipeline(
    out: Place,
    *,
    retriever: Place | Sequence[Place] | Mapping[str, Place],
    ranker: Place,
    candidates: int = 500,
    filter: str | None = None,
    device: str = "cpu",
    progress: bool | Stages | None = None,
) -> PipelineModel:
    """Join retrievers and a ranker: one run that finds candidates among all items, filters them and ranks them.

    Args:
        out: Folder of the new run.
        retriever: Models or runs that find candidates; a dict or texts NAME=PATH name them.
        ranker: Model or run that ranks the candidates.
        candidates: Items that the ranker scores for a request.
        filter: Expression over columns of the item catalogue; other items are never recommended.
        device: auto, cpu, cuda or cuda:N.
        progress: A function that receives stages (stage, done, total), or False for no bar.

    Raises:
        SettingsError: for a number of candidates out of range.
        BundleError: for models that can't be joined.
    """
    from recspec.inference import build_pipeline
    from recspec.loading import pick_device

    if isinstance(retriever, Mapping):
        named = [f"{name}={os.fspath(place)}" for name, place in retriever.items()]
    else:
        several = [retriever] if isinstance(retriever, (str, os.PathLike)) else list(retriever)
        named = [os.fspath(each) for each in several]
    if isinstance(candidates, bool) or not 1 <= candidates <= 100_000:
        raise SettingsError(f"pipeline: candidates is {candidates!r}; expected a whole number from 1 to 100,000")
    with stages(progress) as show:
        made = build_pipeline(
            Path(out),
            named,
            Path(ranker),
            candidates=candidates,
            filter=filter,
            device=pick_device(device),
            progress=show,
        )
    source = ranker if isinstance(ranker, Model) else None
    model = PipelineModel(
        out, device=device, kind=source.kind if source else "pyarrow", data=source.data if source else None
    )
    model.built = made
    return model
