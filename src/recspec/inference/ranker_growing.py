"""Grows LightGBM's lambdarank over retrievers: `pipeline build --ranker lightgbm`.

Retrievers are fitted to train, and the trees learn to order their candidates by the positives of valid, which no
retriever has seen. Four fifths of the users of valid grow the trees, and NDCG@10 of the others stops the growth.

Shapes: C candidates of a user; F columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recspec.base.errors import DataError, SettingsError, require_extra
from recspec.bundle import Bundle, Member, PipelineCard, RetrieverCard, TreeRanker, blend_of
from recspec.evaluation import EvaluateSettings, EvaluationTask, informed
from recspec.feature_spec import FeatureSpec
from recspec.inference.pipeline import Pipeline, Retriever, may_bring
from recspec.models import ItemModel

MOST_USERS = 20_000
"""Users of valid whose candidates are learnt from."""
MOST_CANDIDATES = 200
"""Candidates of each user that are learnt from."""
USERS_AT_ONCE = 64
HELD_OUT = 0.2
"""Share of the users who stop the growth."""

PARAMETERS = {
    "objective": "lambdarank",
    "metric": "ndcg",
    "eval_at": [10],
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 100,
    "feature_fraction": 0.7,
    "seed": 0,
    "use_missing": False,
    "deterministic": True,
    "force_row_wise": True,
    "verbosity": -1,
}
MOST_TREES, PATIENCE = 1000, 50

Group = tuple[NDArray[np.float32], NDArray[np.bool_]]
"""The columns (C, F) of a user's candidates, and which ones are positives."""


def grow_ranker(
    spec: FeatureSpec,
    trained: Sequence[Bundle],
    candidates: int,
    progress: Callable[[str, float, float | None], None] = lambda _stage, _done, _total: None,
) -> tuple[TreeRanker, dict[str, object]]:
    """The ranker of retrievers' candidates, and the facts of its growth.

    Raises:
        SettingsError: naming every retriever that can't be a part, and why; or without a split valid.
        DataError: if no candidate is a positive of valid.
        MissingExtraError: without LightGBM.
    """
    lightgbm = require_extra("lightgbm", "baselines")
    models = _members(spec, trained)
    task = EvaluationTask(spec, "valid", ["full"], EvaluateSettings(users=MOST_USERS))
    learning = _blended(spec, trained, [informed(each, task) for each in models])
    counts = task.known_positives.counts
    learning.counts = torch.from_numpy(counts.astype(np.int64))
    learning.events = torch.from_numpy(np.diff(task.known_positives.offsets))
    parts: tuple[list[Group], list[Group]] = ([], [])
    users = task.ranked_users
    held = np.random.default_rng(0).random(len(users)) < HELD_OUT
    pipeline = _pipeline(spec, learning.models, counts, min(candidates, MOST_CANDIDATES))
    for start in range(0, len(users), USERS_AT_ONCE):
        progress("ranker", start, len(users))
        groups = _groups(task, pipeline, learning, users[start : start + USERS_AT_ONCE])
        for stopping, group in zip(held[start:].tolist(), groups, strict=False):
            if group is not None:
                parts[int(stopping)].append(group)
    if not all(parts):
        raise DataError(f"{spec.folder}: too few candidates are positives of valid; take more --candidates")
    data, stops = (
        lightgbm.Dataset(
            np.concatenate([each for each, _ in groups]),
            np.concatenate([labels for _, labels in groups]).astype(np.int32),
            group=[len(labels) for _, labels in groups],
        )
        for groups in parts
    )
    stops.set_reference(data)
    booster = lightgbm.train(
        {**PARAMETERS, "num_threads": torch.get_num_threads()},
        data,
        MOST_TREES,
        valid_sets=[stops],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )
    best = booster.best_iteration or booster.current_iteration()
    made = _blended(spec, trained, models)
    made.trees.fill([each["tree_structure"] for each in booster.dump_model(num_iteration=best)["tree_info"]])
    seen = trained[0].seen
    assert seen is not None
    owners = torch.repeat_interleave(torch.arange(seen.num_users), seen.offsets.diff())
    made.counts, made.events = seen.counts.long(), torch.bincount(owners[seen.is_known], minlength=seen.num_users)
    gains = made.trees.gains()
    facts: dict[str, object] = {
        "groups": len(parts[0]) + len(parts[1]),
        "users": len(users),
        "trees": best,
        "ndcg@10": round(float(booster.best_score["valid_0"]["ndcg@10"]), 6),
        "importance": dict(zip(made.column_names(), (gains / gains.sum().clamp(min=1e-300)).tolist(), strict=True)),
    }
    return made.eval(), facts


def _members(spec: FeatureSpec, trained: Sequence[Bundle]) -> list[ItemModel]:
    """The models of retrievers, if each can be a part of the ranker."""
    problems = [] if "valid" in spec.splits else [f"{spec.folder} has no split valid to learn the order from"]
    for each in trained:
        if not isinstance(each.model, ItemModel):
            problems.append(f"{each.folder}: {each.card.model} ranks by features; it takes models of the users' events")
        if "valid" in (splits := each.card.train.get("train_splits", ())):  # type: ignore[operator]
            problems.append(f"{each.folder}: was trained on {' and '.join(map(str, splits))}; train it on train alone")  # type: ignore[call-overload]
    SettingsError.refuse("pipeline build: --ranker lightgbm", problems)
    return [each.model for each in trained if isinstance(each.model, ItemModel)]


def _blended(spec: FeatureSpec, trained: Sequence[Bundle], models: Sequence[ItemModel]) -> TreeRanker:
    parts = [Member(model=each.card.model, settings=dict(each.card.settings), weight=1.0) for each in trained]
    made = blend_of(spec, list(zip(parts, models, strict=True)), TreeRanker)
    made.add_trees()
    return made


def _pipeline(spec: FeatureSpec, models: Sequence[ItemModel], counts: NDArray[Any], candidates: int) -> Pipeline:
    """The retrieval that the trees learn behind; whether an index finds the candidates does not matter."""
    first = int(spec.reserves_unknown(spec.item_id))
    names = [f"retriever{place}" for place in range(len(models))]
    card = PipelineCard(
        candidates=candidates, retrievers=tuple(RetrieverCard(name=name, has_index=False) for name in names)
    )
    found = [
        Retriever(name, each, None, may_bring(each, counts, first)) for name, each in zip(names, models, strict=True)
    ]
    return Pipeline(card, found, np.where(np.arange(len(counts)) < first, 0, counts), None)


def _groups(
    task: EvaluationTask, pipeline: Pipeline, model: TreeRanker, users: NDArray[np.integer[Any]]
) -> list[Group | None]:
    """The candidates of each user; None for those without a positive among them."""
    asked = {model.user_id: torch.from_numpy(users.astype(np.int64))}
    hidden = [task.excluded.of(users[row : row + 1])[1].astype(np.int64) for row in range(len(users))]
    found = pipeline.candidates([(each.model, asked) for each in pipeline.retrievers], len(users), excluded=hidden)
    made: list[Group | None] = []
    for row, each in enumerate(found):
        labels = np.isin(each.ids, task.truth.of(users[row : row + 1])[1])
        if not labels.any():
            made.append(None)
            continue
        with torch.inference_mode():
            columns = model.columns(asked[model.user_id][row : row + 1], torch.from_numpy(each.ids).unsqueeze(0))
        made.append((columns[0].float().numpy(), labels))
    return made
