"""New events into a trained model: the dataset grows, and the model goes on from its weights.

Ids grow at the end of their vocabularies. So the old values of a table are its first rows, and of any other tensor the
first entries of each dimension. New rows keep the values that the model gives them at first; their optimizer state is
that of a row that no step has changed.

RUN/updates/0001 holds the new version; see `bundle.versions`. A model that is fitted in one go is fitted again, with
the settings that were chosen. Another one trains some epochs on the new rows and a replayed share of the old ones (a
model whose rows are users: on the users with new events and a share of the others).

A blend or a pipeline is made of runs. Their next versions, in RUN/updates/0001/parts, are made of one grown dataset,
and then the blend or the pipeline of these.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from recspec.base import config
from recspec.base.errors import (
    BundleError,
    CheckpointError,
    DataError,
    Interrupted,
    SettingsError,
    SpecError,
    TrainingError,
    how_many,
)
from recspec.base.files import local
from recspec.base.signals import stopping_at_once
from recspec.base.stores import fetched, url_text
from recspec.bundle import Card, TreeRanker, checkpoint, meaning_digest, run_record, versions
from recspec.bundle import cards as pipeline_card
from recspec.bundle import folder as bundle
from recspec.feature_spec import FILE_NAME, FeatureSpec
from recspec.loading import NewRowsAndReplay, Ranks
from recspec.models import FittedModel, Ids, Wide, find_model, require_libraries
from recspec.models.layers import Embeddings
from recspec.training import run_folder
from recspec.training.blend import blend_runs
from recspec.training.loop import NOT_BEGUN, TrainingRun, run_fit, using_threads
from recspec.training.optimizers import Optimizers
from recspec.training.plan import make_fit_plan, make_plan
from recspec.training.result import Result
from recspec.training.run_folder import Event
from recspec.training.settings import TrainSettings
from recspec.training.step import Built

if TYPE_CHECKING:
    from recspec.datasets import Grown


Copy = Callable[[Tensor, Tensor], None]
"""Copies the values of an old tensor into the new one."""


def warm_start(model: nn.Module, before: nn.Module, optimizers: Optimizers, state: Mapping[str, Tensor]) -> list[str]:
    """Give a model the weights of the one before, and its optimizers their `state`; returns notes.

    Raises:
        SettingsError: if a tensor has become smaller, or has other dimensions.
    """
    copies = dict(_of_tables(model, before))
    old, own = before.state_dict(), model.state_dict()
    kept = {name for name, _ in before.named_parameters()} | {name for name, _ in _plain_buffers(before)}
    problems = []
    for name, tensor in old.items():
        if name not in kept or name not in own:
            continue
        if _fits(tensor, own[name]):
            with torch.no_grad():
                copies.get(name, _leading)(tensor, own[name])
        else:
            problems.append(f"'{name}' was {tuple(tensor.shape)}, and is {tuple(own[name].shape)} now")
    SettingsError.refuse("the model can't go on from its weights; train it anew", problems)
    return _restore(optimizers, state, own, copies)


def _of_tables(model: nn.Module, before: nn.Module) -> Iterable[tuple[str, Copy]]:
    """How to copy each store of embeddings, its tables one by one, and weights of crosses."""
    olds = {name: each for name, each in before.named_modules() if isinstance(each, Embeddings)}
    for prefix, module in model.named_modules():
        if isinstance(module, Embeddings) and prefix in olds:
            for key in module.stores:
                yield f"{prefix}.stores.{key}", _by_table(olds[prefix].tables[key], module.tables[key])
    wides = {name: each for name, each in before.named_modules() if isinstance(each, Wide)}
    for prefix, module in model.named_modules():
        if isinstance(module, Wide) and prefix in wides:
            yield f"{prefix}.cross_weights", _by_combination(wides[prefix], module)


def _by_table(old: Mapping[str, range], new: Mapping[str, range]) -> Copy:
    def copy(source: Tensor, target: Tensor) -> None:
        for vocabulary, rows in old.items():
            place = new[vocabulary].start
            target[place : place + len(rows)] = source[rows.start : rows.stop]

    return copy


def _by_combination(old: Wide, new: Wide) -> Copy:
    """More ids of a column give a cross's combinations other numbers."""

    def copy(source: Tensor, target: Tensor) -> None:
        for place, cross in enumerate(old.crosses):
            sizes, start = [old.sizes[name] for name in cross], place * old.cross_buckets
            if prod(sizes) > old.cross_buckets:  # hashes of ids, before and now
                target[start : start + old.cross_buckets] = source[start : start + old.cross_buckets]
                continue
            ids = torch.unravel_index(torch.arange(prod(sizes)), sizes)
            target[start + new.bucket(dict(zip(cross, ids, strict=True)), cross)] = source[start : start + prod(sizes)]

    return copy


def _leading(source: Tensor, target: Tensor) -> None:
    target[tuple(slice(0, size) for size in source.shape)] = source


def _fits(old: Tensor, new: Tensor) -> bool:
    sizes = zip(old.shape, new.shape, strict=False)
    return old.dim() == new.dim() and old.dtype == new.dtype and all(was <= now for was, now in sizes)


def _plain_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Buffers that training changes; what a module learns of the data by itself (`set_seen_ids`, `set`) is kept."""
    for prefix, part in module.named_modules():
        if not (hasattr(part, "set_seen_ids") or (hasattr(part, "allocate_buffers") and hasattr(part, "set"))):
            yield from part.named_buffers(prefix, recurse=False)


def _restore(
    optimizers: Optimizers, state: Mapping[str, Tensor], own: Mapping[str, Tensor], copies: Mapping[str, Copy]
) -> list[str]:
    """Grow the optimizers' state and restore it; a note if there is none."""
    if not state:
        return ["the run before has no checkpoint with the state of its optimizers, which start anew"]
    grown: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.rpartition("/")[0].partition("/")[2]
        weight = own.get(name)
        if weight is None or not value.dim():
            grown[key] = value
            continue
        shape = tuple(weight.shape) if value.dim() == weight.dim() and value.shape[1:] == weight.shape[1:] else None
        if shape is None:  # one number a row, or a tensor that grew in another dimension
            shape = tuple(max(was, now) for was, now in zip(value.shape, weight.shape, strict=False))
            shape = (*shape, *value.shape[len(shape) :])
        if value.dim() == weight.dim() and value.shape[-1] == 1 and weight.dim() > 1:
            shape = (*shape[:-1], 1)
        target = value.new_zeros(shape)
        copies.get(name, _leading)(value, target)
        grown[key] = target
    optimizers.restore(grown)
    return []


DATA, PARTS = "data", "parts"


class UpdateSettings(config.Settings):
    """How a model that is trained by steps takes new events."""

    epochs: int = Field(2, ge=1, description="passes over the new rows and the replayed ones")
    replay: float = Field(
        0.2, ge=0, le=1, description="share of the old rows that are trained on again, so that they are not forgotten"
    )
    learning_rate: float = Field(
        1.0, gt=0, description="factor of the run's learning rate, which stays constant in an update"
    )
    admit_after: int = Field(
        1, ge=1, description="events from which a new user or item gets an id; until then they wait"
    )
    retire_after: config.Duration | None = Field(
        None,
        description="time without an event after which a user or item is retired, such as 180d: its events are "
        "dropped, its id stays blank, and it is not recommended",
    )
    retire_most: float = Field(
        0.5, ge=0, le=1, description="largest share of the users or items that one update retires; more are refused"
    )


@dataclass(frozen=True)
class Updated:
    """A new version of a run."""

    base: Path
    """The bundle that it goes on from."""
    folder: Path
    """RUN/updates/NNNN, a run by itself."""
    bundle: Path
    counts: Mapping[str, int]
    """`events`, `users` and `items` that are new, and rows `left_out`."""
    notes: tuple[str, ...]
    """New users and items of which the events tell too little."""
    rows: Mapping[str, int]
    """Rows of each split of the grown dataset."""
    result: Result | None
    """What training reached; None for a blend or a pipeline."""
    bundle_bytes: int
    seconds: Mapping[str, float]
    """Of the dataset (`data`), the model (`train`), and `all`."""

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        places = {name: str(getattr(self, name)) for name in ("base", "folder", "bundle")}
        return {**vars(self), **places, "result": None if self.result is None else self.result.to_dict()}


class BuildPipeline(Protocol):
    """Joins runs to a pipeline, as `inference.build_pipeline` does."""

    def __call__(
        self, target: Path, retrievers: Sequence[str], ranker: Path | None, *, candidates: int, filter: str | None
    ) -> object: ...


@dataclass(frozen=True)
class Learning:
    """How the models of an update learn, and who hears of it."""

    settings: UpdateSettings = field(default_factory=UpdateSettings)
    build_pipeline: BuildPipeline | None = None
    """Without it, pipelines are refused."""
    on_event: Callable[[Event], None] = lambda _: None
    stop_requested: Callable[[], bool] = lambda: False


def update(
    run: Path,
    events: Path,
    *,
    settings: UpdateSettings | None = None,
    data: FeatureSpec | None = None,
    build_pipeline: BuildPipeline | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Updated:
    """Make the next version of a run from a file of raw events, which answers from then on.

    `data` is the dataset of the version before; by default it lies where the run says.

    Raises:
        BundleError: if the run holds no model, or one that takes no new events.
        DataError: if the dataset takes none, or what is wrong with the events; nothing has changed then.
        BundleError: if the dataset can't be opened where the run says.
    """
    run = local(run, "RUN")
    check_run(run)
    learning = Learning(settings or UpdateSettings(), build_pipeline, on_event, stop_requested)
    with versions.updating(run):
        made = next_version(run, events, learning, data=data)
        if made.base.parent != run:  # the state of the optimizers goes on from the newest version
            for home in (run_record.home(made.base), *(made.base.parent / PARTS).glob("*")):
                shutil.rmtree(home / run_folder.CHECKPOINTS, ignore_errors=True)
        if versions.read_current(run) is not None:
            versions.publish(run, versions.number_of(made.bundle), base=versions.number_of(made.base))
    return made


def next_version(
    run: Path,
    events: Path,
    learning: Learning,
    *,
    data: FeatureSpec | None = None,
    metadata: Mapping[str, object] = MappingProxyType({}),
) -> Updated:
    """As `update`, while the caller holds the lock of `versions.updating`, and says which version answers.

    The grown dataset takes over `metadata`.
    """
    started = time.monotonic()
    with _new_version(run) as folder:
        base = bundle.find(run)  # the version that answers, now that no other update can end
        card = bundle.read_card(base)
        parts = parts_of(base, card, learning)
        spec = dataset_of(base, data)
        (folder / DATA).mkdir(parents=True)
        from recspec.datasets import append_events  # needs Ibis and DuckDB, which training does without

        own = learning.settings
        with stopping_at_once(NOT_BEGUN):
            grown = append_events(
                spec,
                events,
                folder / DATA,
                admit_after=own.admit_after,
                retire_after=own.retire_after,
                retire_most=own.retire_most,
                metadata=metadata,
            )
        prepared = time.monotonic()
        result = _make(base, card, parts, grown, folder, learning)
    ended = time.monotonic()
    seconds = {"data": prepared - started, "train": ended - prepared, "all": ended - started}
    rows = grown.spec.summary.get("rows")
    whole = sum(file.stat().st_size for file in (folder / run_folder.BUNDLE).rglob("*") if file.is_file())
    return Updated(
        base=base,
        folder=folder,
        bundle=folder / run_folder.BUNDLE,
        counts=grown.counts,
        notes=grown.notes,
        rows=rows if isinstance(rows, dict) else {},
        result=result,
        bundle_bytes=whole,
        seconds={name: round(each, 3) for name, each in seconds.items()},
    )


@contextmanager
def _new_version(run: Path) -> Iterator[Path]:
    """The folder of the next version, which is removed if the block fails; so there is nothing to resume."""
    folder = versions.next_update(run)
    try:
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, Interrupted):
            again = "the same command begins the update anew"
            raise Interrupted(f"{run}: stopped as asked; the run is as it was before, and {again}") from None
        if isinstance(error, (CheckpointError, TrainingError)):
            told = "; ".join(part for part in str(error).split("; ") if "--resume" not in part)
            raise type(error)(f"{told}; {run} is as it was before the update") from None
        raise


def check_run(run: Path) -> None:
    """Refuse what is no run that takes updates. Raises BundleError."""
    if (run / "bundle.json").is_file():
        raise BundleError(f"{run}: is a bundle, whose files must stay as they are; name the run that holds it")
    if versions.number_of(run / versions.BUNDLE) and (run.parent.parent / versions.BUNDLE).is_dir():
        raise BundleError(f"{run}: is a version of {run.parent.parent}; name that run, whose newest version is updated")
    bundle.find(run)


def dataset_of(base: Path, given: FeatureSpec | None) -> FeatureSpec:
    """The dataset that a version was trained on: where it was, or beside the run or inside it if both were moved."""
    spec = given
    if spec is None:
        home = run_record.home(base)
        record = run_record.read(home)
        if record is None or record.data is None:
            raise BundleError(f"{base}: does not say which dataset it was trained on; name it")
        place = record.data.path
        if not url_text(place) and not Path(place).exists():
            moved = (home / Path(place).name, home.resolve().parent / Path(place).name)
            place = next((str(each) for each in moved if (each / FILE_NAME).is_file()), place)
        try:
            spec = FeatureSpec.load(fetched(place, "the dataset") if url_text(place) else place)
        except (SpecError, DataError) as error:
            raise BundleError(f"{error}; if the dataset of {base} has moved, name it with --data (data=)") from None
    own = FeatureSpec.load(base)
    if meaning_digest(own) != meaning_digest(spec):
        raise DataError(
            f"{spec.folder}: is not the dataset that {base} was trained on: features, vocabularies or catalogues differ"
        )
    return spec


def parts_of(base: Path, card: Card, learning: Learning) -> list[Path] | None:
    """The bundles of the models that a blend or a pipeline was made of, in that order; None for a model alone.

    Raises:
        BundleError: if it can't be made of them again.
    """
    is_pipeline = pipeline_card.read_pipeline(base) is not None
    if card.model not in bundle.OF_MEMBERS and not is_pipeline:
        return None
    if is_pipeline and learning.build_pipeline is None:
        raise BundleError(f"{base}: is a pipeline; update its ranker and its retrievers, and make it again")
    record = run_record.read(run_record.home(base))
    if record is None or not record.made_of:
        raise BundleError(f"{base}: does not say which runs it was made of; make it again")
    meaning, found, problems = meaning_digest(FeatureSpec.load(base)), list[Path](), list[str]()
    for run in map(Path, record.made_of):
        own = base.parent / PARTS / run.name  # also after the run was moved
        places = [place / name for place in (own, run) for name in (".", run_folder.BUNDLE)]
        places += [each / run_folder.BUNDLE for each in reversed(versions.updates_of(run))]
        alike = (each for each in places if (each / "bundle.json").is_file())
        part = next((each for each in alike if meaning_digest(FeatureSpec.load(each)) == meaning), None)
        if part is None:
            problems.append(f"{run}: holds no model of the data that {base} was made on; make it again")
        else:
            found.append(part)
    BundleError.refuse(f"{base}: its parts can't be updated", problems)
    return found


def _make(
    base: Path, card: Card, parts: Sequence[Path] | None, grown: Grown, folder: Path, learning: Learning
) -> Result | None:
    """The next version of a bundle, in `folder`; that of each of its parts goes into `folder / PARTS`."""
    if parts is None:
        return _learn(base, card, grown, folder, learning)
    runs = []
    for number, part in enumerate(parts):
        own = bundle.read_card(part)
        runs.append(folder / PARTS / f"{number + 1}-{own.model}")
        _make(part, own, parts_of(part, own, learning), grown, runs[-1], learning)
    join_parts(base, card, runs, grown.spec, folder, learning)
    return None


def join_parts(
    base: Path, card: Card, runs: Sequence[Path], spec: FeatureSpec, folder: Path, learning: Learning
) -> None:
    """Blend runs, or join them to a pipeline, as `base` is of its parts; the weights of a blend are chosen on valid."""
    pipeline = pipeline_card.read_pipeline(base)
    if pipeline is None:
        metric = card.trained.get("valid_metric")
        may_choose = len(runs) > 1 and "valid" in spec.splits and not any(map(_knows_valid, runs))
        if isinstance(metric, str) and may_choose:
            blend_runs(folder, runs, spec=spec, metric=metric)
        else:
            blend_runs(folder, runs, spec=spec, like=base)
        return
    assert learning.build_pipeline is not None
    ranker, retrievers = (None, runs) if card.model == TreeRanker.name else (runs[0], runs[1:])
    named = [f"{each.name}={run}" for each, run in zip(pipeline.retrievers, retrievers, strict=True)]
    learning.build_pipeline(folder, named, ranker, candidates=pipeline.candidates, filter=pipeline.filter)


def _knows_valid(run: Path) -> bool:
    found = bundle.read_card(bundle.find(run)).trained.get("splits")
    return isinstance(found, (list, tuple)) and "valid" in found


def _learn(base: Path, card: Card, grown: Grown, folder: Path, learning: Learning) -> Result:
    """Fit the model again on all events, with the settings that it has, or train it on from its weights."""
    settings = learning.settings
    kind, ranks, made_of = find_model(card.model), Ranks(), (run_record.home(base),)
    require_libraries(kind)
    own = config.build(kind.Settings, "bundle.json: settings", card.settings)
    if issubclass(kind, FittedModel):
        asked = config.build(TrainSettings, "bundle.json: train", card.train)
        fit = replace(make_fit_plan(card.model, grown.spec, asked, own, ranks), update_of=made_of)
        with using_threads(fit.threads.value):
            return run_fit(fit, folder, ranks, learning.on_event, learning.stop_requested)
    asked = _train_settings(card, settings)
    first_new = [grown.first_new.get(split, 0) for split in asked.train_splits]
    newest, users = NewRowsAndReplay(first_new, settings.replay, asked.seed), _users(grown, settings.replay, asked.seed)
    plan = make_plan(card.model, grown.spec, asked, own, ranks, newest=newest, users=users)
    plan = replace(plan, notes=(*plan.notes, _told(grown, settings)), update_of=made_of)

    def start(built: Built) -> list[str]:
        return warm_start(built.model, bundle.load(base).model, built.optimizers, _optimizer_state(base))

    with using_threads(plan.threads.value):
        training = TrainingRun(plan, folder, ranks, learning.on_event, learning.stop_requested, start=start)
        with closing(training.log):
            return training.train(resume=False)


def _train_settings(card: Card, settings: UpdateSettings) -> TrainSettings:
    """The settings of the run, with the epochs of an update and a constant learning rate."""
    train = {**card.train, "schedule": "constant", "warmup_epochs": 0, "epochs": settings.epochs, "keep_checkpoints": 1}
    train |= dict.fromkeys(("minutes", "patience", "falling_patience", "target"))
    if isinstance(parts := train.get("parts"), dict):
        train["parts"] = {
            name: scale_learning_rate(part, settings.learning_rate) if isinstance(part, dict) else part
            for name, part in parts.items()
        }
    return config.build(TrainSettings, "bundle.json: train", scale_learning_rate(train, settings.learning_rate))


def scale_learning_rate(settings: dict[str, object], factor: float) -> dict[str, object]:
    """Settings with another learning rate, which stays constant."""
    constant = {"schedule": "constant"} if "schedule" in settings else {}
    rate = settings.get("learning_rate")
    return {**settings, **constant, **({"learning_rate": rate * factor} if isinstance(rate, (int, float)) else {})}


def _users(grown: Grown, share: float, seed: int) -> Ids:
    """The users with new events, and a share of all others."""
    everyone = np.arange(grown.spec.num_ids(grown.spec.user_id) if "user_id" in grown.spec.metadata else 0)
    drawn = np.random.default_rng((seed, len(everyone))).random(len(everyone)) < share
    drawn[grown.touched] = True
    return np.flatnonzero(drawn)


def _told(grown: Grown, settings: UpdateSettings) -> str:
    counts = grown.counts
    return (
        f"{', '.join(how_many(counts[f'{thing}s'], f'new {thing}') for thing in ('event', 'user', 'item'))}; "
        f"{settings.replay:.0%} of what was there before is trained on again"
    )


def _optimizer_state(base: Path) -> Mapping[str, Tensor]:
    """The state of the optimizers in the newest checkpoint of the version before; empty without one."""
    try:
        saved, _ = checkpoint.load_latest(run_record.home(base) / run_folder.CHECKPOINTS)
    except (CheckpointError, SettingsError):
        return {}
    return {name: each for name, each in saved.optimizer.items() if isinstance(each, Tensor)}
