"""The choices of a training run, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar, cast, get_args

import numpy as np
import torch

from recspec.base import config
from recspec.base.errors import SettingsError, SpecError, listed, unknown
from recspec.base.machine import parse_bytes
from recspec.data.storage import open_split
from recspec.evaluation import count_labels, list_metric
from recspec.feature_spec import FOLD_IN, NO_FILES, FeatureSpec, Role
from recspec.loading import (
    HeldOutShare,
    Loader,
    NewRowsAndReplay,
    Placement,
    Ranks,
    UserRows,
    holds_negatives,
    negatives_by_default,
    place,
    torchrec_tables,
)
from recspec.models import FittedModel, Ids, ItemModel, Model, MultiTask, Shapes, TrainedItemModel
from recspec.models.layers import Embeddings, kernels
from recspec.training.optimizers import MetaModel
from recspec.training.product_rates import ONEDNN_PAYS, ProductRates
from recspec.training.row_optimizers import sparse_pays
from recspec.training.settings import Precision, TrainSettings, numbers_beside, updates_rows_exactly

T = TypeVar("T", covariant=True)

CompileMode = Literal["none", "default", "reduce-overhead"]
"""A mode of `torch.compile`, or none; `reduce-overhead` replays CUDA graphs."""

HELD_OUT = "held out"
"""The valid split of a dataset without one: a share of the training rows."""

STEPS_PER_EPOCH = 200
MOST_ROWS = {"cpu": 65536, "cuda": 131072}
FEWEST_ROWS = 256


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value and the reason for it; `str` gives both in a line."""

    value: T
    reason: str

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, int):
            shown = f"{value:,}"
        else:
            shown = (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"
        return f"{shown}: {self.reason}"


# --- rows ------------------------------------------------------------------------------------------------------------


def of_label(spec: FeatureSpec, settings: TrainSettings) -> FeatureSpec:
    """The dataset with the label of the settings as the first. Raises `SettingsError` if it has no such label."""
    if settings.label is None:
        return spec
    if settings.label not in spec.labels:
        raise SettingsError(f"{spec.folder}: train.label: {unknown('label', settings.label, spec.labels)}")
    return spec.of_label(settings.label)


def check_funnel(spec: FeatureSpec, settings: config.Settings, splits: Sequence[str]) -> None:
    """Refuse labels of form esmm of which a later one is 1 where the one before is 0."""
    if not isinstance(settings, MultiTask.Settings) or settings.form != "esmm":
        return
    pairs = list(pairwise(spec.labels))
    wrong, rows = dict.fromkeys(pairs, 0), 0
    for block in (each for split in splits for each in open_split(spec, split, spec.labels).batches()):
        labels = {label: np.asarray(block[label]).reshape(-1) > 0 for label in spec.labels}
        rows += len(labels[spec.label])
        for before, after in pairs:
            wrong[before, after] += int((labels[after] & ~labels[before]).sum())
    found = [
        f"'{after}' is 1 and '{before}' is 0 in {count:,} of {rows:,} rows"
        for (before, after), count in wrong.items()
        if count
    ]
    if found:
        raise SettingsError.of(
            f"{spec.folder}: form esmm takes labels in the order of a funnel; take form mmoe, or another order", found
        )


def check_splits(spec: FeatureSpec, splits: Sequence[str]) -> None:
    """Refuse splits to train on that the dataset lacks."""
    if not spec.splits:
        raise SpecError(f"{spec.folder}: {NO_FILES}")
    problems = [unknown("split", split, spec.splits) for split in splits if split not in spec.splits]
    SpecError.refuse(f"{spec.folder}: train.train_splits", problems)


def pick_valid(splits: Sequence[str], settings: TrainSettings, kind: type[Model] = Model) -> Choice[str]:
    """The split that picks the best epoch, or the settings of a fit; `HELD_OUT` rows of train; empty without either."""
    fitted, defaults = issubclass(kind, FittedModel), "settings that were not given have their defaults"
    if "valid" in splits:
        if "valid" not in settings.train_splits:
            return Choice("valid", "the dataset has this split")
        if not fitted:
            return Choice("", "train.train_splits trains on valid")
        if set(settings.train_splits) == {"valid"}:
            return Choice("", f"train.train_splits is valid alone: {defaults}")
        return Choice("valid", "settings are chosen on it first; then all of train.train_splits is fitted")
    if fitted:
        return Choice("", f"no split valid: {defaults}")
    if settings.valid_share:
        return Choice(HELD_OUT, f"no split valid; train.valid_share is {settings.valid_share}")
    return Choice("", "no split valid, and train.valid_share is 0")


def check_held_out(model: Model, spec: FeatureSpec) -> None:
    """Refuse a model that reads no events for a dataset of held-out users, of whom nothing else is known."""
    reads_events = isinstance(model, ItemModel) or not {*spec.role("history")}.isdisjoint(model.features())
    if FOLD_IN in spec.splits and not reads_events:
        raise SpecError(
            f"{spec.folder}: train has no row of the users of valid and test, and {model.name} reads no events by "
            "which to know them; train a model that does, such as ease or sasrec, or prepare with --set history=50 for "
            "one that reads histories"
        )


def check_calibration(spec: FeatureSpec, settings: TrainSettings, valid: Choice[str]) -> None:
    """Refuse a calibration that no rows can fit: labelled rows of both classes that are not trained on."""
    if settings.calibration == "none":
        return
    if not valid.value:
        lacks = f"no rows to fit it on: {valid.reason}"
    elif spec.has_series or pick_negatives(spec, settings).value:
        lacks = "no labelled rows to fit it on: negatives are drawn, so the rate of positives is that of the drawing"
    else:
        splits = [valid.value] if valid.value in spec.splits else settings.train_splits
        rows, positives = count_labels(spec, splits)
        if 0 < positives < rows:
            return
        lacks = f"rows of one class: {positives:,} of {rows:,} rows of {listed(splits)} are positive"
    raise SettingsError(
        f"{spec.folder}: train.calibration is {settings.calibration}, and there are {lacks}; set train.calibration=none"
    )


def pick_negatives(spec: FeatureSpec, settings: TrainSettings, kind: type[Model] = Model) -> Choice[int]:
    """Negatives drawn for each positive."""
    if issubclass(kind, TrainedItemModel):
        return Choice(0, "a row is a user, whose items are compared with all others or with those that the model draws")
    if settings.negatives is None:
        number = negatives_by_default(spec)
        return Choice(number, "rows are interactions" if number else "rows have their own labels")
    if settings.negatives > 0:
        spec.require(("user", "item"), "drawing negatives (train.negatives)")
    return Choice(settings.negatives, "as asked")


def pick_batch_size(asked: int | None, resumed: int | None, samples: int, device: torch.device) -> Choice[int]:
    """Rows of a step, from the setting, the size in the run that continues, or the number of samples in an epoch."""
    if asked is not None:
        return Choice(asked, "as asked")
    if resumed is not None:
        return Choice(resumed, "as at the start of the run")
    most = MOST_ROWS.get(device.type, MOST_ROWS["cpu"])
    wanted = 1 << max(0, (samples // STEPS_PER_EPOCH).bit_length() - 1)
    if wanted > most:
        return Choice(most, f"the most chosen on a {device.type}, for an epoch of {samples:,} samples")
    if wanted < FEWEST_ROWS:
        return Choice(FEWEST_ROWS, f"the smallest automatic size, for an epoch of {samples:,} samples")
    return Choice(wanted, f"200 to 400 steps for an epoch of {samples:,} samples")


def pick_metric(spec: FeatureSpec, settings: TrainSettings, kind: type[Model] = Model) -> Choice[str]:
    """The metric of valid: the rank of the positive among enough candidates, else AUC of all rows."""
    if settings.metric is not None:
        return Choice(settings.metric, "as asked")
    if issubclass(kind, ItemModel):
        return Choice(list_metric(spec), "all items ranked for each user")
    if issubclass(kind, FittedModel):
        return Choice(kind.metric, "rows have labels of their own")
    candidates = spec.metadata.get("test_samples_per_series")
    if "valid" in spec.splits and isinstance(candidates, int) and candidates > 10:
        return Choice("sampled/ndcg@10", f"each positive has {candidates} candidates")
    return Choice("rows/auc", "positives have no more than 10 candidates")


def unused_features(model: Model, spec: FeatureSpec) -> dict[str, list[str]]:
    """Features of each role that the model does not use."""
    roles: tuple[Role, ...] = ("user", "item", "context", "history", "negative_history")
    read = {*model.features(), *model.loss_needs().features}
    found = {role: [name for name in spec.role(role) if name not in read] for role in roles}
    return {role: names for role, names in found.items() if names}


def check_users(kind: type[TrainedItemModel], settings: TrainSettings) -> None:
    """Refuse settings of rows, which a model that learns from users does not have."""
    unread = {"negatives": "the items that it compares are settings of the model"}
    unread |= {"valid_share": "it learns from whole users, so prepare a split valid"}
    unread |= {"calibration": "its scores are no logits"} if settings.calibration != "none" else {}
    found = [f"train.{name}: {why}" for name, why in unread.items() if getattr(settings, name) not in (None, 0, 0.0)]
    SettingsError.refuse(f"{kind.name} is trained on users, not on rows; leave these out", found)


def check_fit_settings(kind: type[FittedModel], settings: TrainSettings) -> None:
    """Refuse settings of training that were given and that a fitted model does not read."""
    given = settings.model_fields_set - set(kind.reads)
    if settings.model_fields_set == set(type(settings).model_fields):  # of a recipe, which holds all of them
        given = {name for name in given if getattr(settings, name) != type(settings).model_fields[name].default}
    if given:
        names, read = (", ".join(f"train.{name}" for name in each) for each in (sorted(given), kind.reads))
        verb, them = ("is a setting", "it") if len(given) == 1 else ("are settings", "them")
        raise SettingsError(
            f"{names} {verb} of gradient steps, and {kind.name} is fitted in one go; leave {them} out. It reads {read} "
            "and its own settings"
        )


def pick_chosen(kind: type[FittedModel], settings: config.Settings, valid: str) -> Choice[tuple[str, ...]]:
    """The settings of a fitted model that are chosen on valid."""
    names = kind.searched()
    free = tuple(name for name in names if name not in settings.model_fields_set)
    if not names:
        return Choice((), f"{kind.name} has nothing to choose")
    if not valid:
        return Choice((), "there is no split valid to choose on")
    if not free:
        return Choice((), "all were given")
    return Choice(free, "not given; the best of a few values on valid is taken")


def open_users(spec: FeatureSpec, settings: TrainSettings, users: Ids, ranks: Ranks) -> Loader:
    """The users to train on."""
    if not len(users):
        raise SpecError(f"{spec.folder}: no user has enough positives in {listed(settings.train_splits)} to learn from")
    size, shared = max(1, settings.batch_size or 1), _of_any_loader(settings, ranks)
    return Loader(spec, (), rows=UserRows(spec, users), features=(spec.user_id,), batch_size=size, **shared)


def _of_any_loader(settings: TrainSettings, ranks: Ranks) -> dict[str, Any]:
    place = {"rank": ranks.rank, "world_size": ranks.world_size, "device": ranks.device}
    return {"seed": settings.seed, "memory_budget": parse_bytes(settings.memory_budget), **place}


def pick_event_weights(spec: FeatureSpec, settings: TrainSettings, kind: type[Model]) -> Choice[str] | None:
    """The feature in proportion to which rows are drawn; None if the dataset has no weights."""
    name = spec.metadata.get("event_weight")
    if name is None:
        return None
    if issubclass(kind, TrainedItemModel):
        return Choice("", f"{kind.name} learns from whole users, and each of their events counts 1")
    if settings.event_weights == "ignore":
        return Choice("", "train.event_weights is ignore: each row is drawn once an epoch")
    return Choice(str(name), "rows are drawn in proportion to it, with the negatives drawn for them")


def open_rows(
    spec: FeatureSpec,
    settings: TrainSettings,
    model: Model,
    ranks: Ranks,
    *,
    negatives: int,
    valid: str,
    held_out: bool = False,
    newest: NewRowsAndReplay | None = None,
) -> Loader:
    """The rows to train on, or with `held_out` those that `valid_share` keeps from training, in order.

    With `newest`, only those rows are trained on.
    """
    share, splits = settings.valid_share if valid == HELD_OUT else 0.0, settings.train_splits
    used = {*model.features(), *spec.labels} if held_out else {*model.loss_needs().features, spec.label}
    weights = pick_event_weights(spec, settings, type(model))
    loader = Loader(
        spec,
        splits,
        batch_size=max(1, (settings.batch_size or 1) // (1 + negatives)),
        features=tuple(name for name in spec.columns(splits[0]) if name in used),
        positives_only=(negatives > 0 or model.loss_needs().shares_negatives)
        and spec.has_series
        and ("valid" in splits or holds_negatives(spec)),
        shuffle=not held_out,
        part=newest or (HeldOutShare(share, held_out, settings.seed) if share else None),
        weights=(weights.value or None) if weights is not None else None,
        **_of_any_loader(settings, ranks),
    )
    if loader.num_rows == 0 and held_out:
        raise SettingsError(f"{spec.folder}: train.valid_share {share:g} of the rows of train is no row; raise it")
    if loader.num_rows == 0:
        raise SpecError(f"{spec.folder}: the training splits {listed(splits)} hold no row")
    return loader


def describe_rows(loader: Loader, settings: TrainSettings, ranks: Ranks) -> Choice[str]:
    """Where the rows are held, and what each rank reads of them."""
    several, size = ranks.world_size > 1, f"the rows take {loader.nbytes:,} bytes"
    if loader.mode == "stream":
        what = loader.held + (", by each rank its share of each epoch" if several else "")
        return Choice(what, f"{size}, more than train.memory_budget ({settings.memory_budget})")
    why = f"{size}, and train.memory_budget is {settings.memory_budget}"
    why += "; each rank holds all rows, so steps are those of one process" if several else ""
    return Choice(loader.held, why)


# --- embedding tables ------------------------------------------------------------------------------------------------


def place_tables(meta: MetaModel, settings: TrainSettings, ranks: Ranks, precision: str) -> Placement:
    """Where the tables lie; precision fp16 allows none that are divided or left on the host."""

    from_zero = {name for name, module, _, _ in meta.tables() if module.std == 0}

    def bytes_per_row(store: str, width: int) -> float:
        own = meta.all_optimizers.settings_of(store)
        whole_gradient = settings.clip_norm is not None or not updates_rows_exactly(own, from_zero=store in from_zero)
        return 4 * width * (1 + numbers_beside(own, width) + whole_gradient + (settings.average > 0))

    placement = place(meta.make, ranks, settings, bytes_per_row)
    if placement.plan.pieces and precision == "fp16":
        raise SettingsError(
            f"train.precision is fp16, whose loss scaler knows only gradients that every rank has, and tables are "
            f"divided or left on the host ({placement.why}); take bf16 or tf32"
        )
    if settings.shard_by == "recspec" or ranks.world_size == 1 or not placement.plan.stores:
        return placement
    by_row = _check_torchrec(meta, settings, ranks, placement)
    return torchrec_tables.divide_by_torchrec(placement, ranks, settings, by_column=not by_row)


def _check_torchrec(meta: MetaModel, settings: TrainSettings, ranks: Ranks, placement: Placement) -> list[str]:
    """Refuse what TorchRec cannot do; returns the stores whose optimizer keeps one number a row."""
    problems: list[str | None] = [*_needs_of_gradients(settings, "TorchRec", {})]
    if settings.average:
        problems.append(f"train.average is {settings.average}, and TorchRec keeps no running mean of its tables")
    if placement.offloaded:
        problems.append(
            f"{listed(sorted(placement.offloaded))} would stay on the host ({placement.why}), and TorchRec holds "
            "tables on the device; take more ranks, or train.offload_embeddings=never"
        )
    if settings.shard_precision == "bf16" and ranks.device.type == "cpu":
        problems.append("train.shard_precision is bf16, which gloo cannot send; take fp16")
    taken = [name for name in placement.plan.stores if torchrec_tables.takes(name)]
    if not taken:
        problems.append(f"no table has a width of a multiple of {torchrec_tables.COLUMNS}, as FBGEMM needs")
    updated = [name for name, *_ in meta.tables() if name in taken]
    problems += [_why_not_fused(meta, name) for name in updated]
    by_row = [name for name in updated if meta.optimizers.settings_of(name).optimizer == "rowwise_adagrad"]
    if by_row and settings.shard_cut == "column_wise":
        problems.append(
            "train.shard_cut is column_wise, and rowwise_adagrad keeps one number for a whole row of "
            f"{listed(by_row)}; take optimizer adagrad or sgd, or train.shard_cut=row_wise"
        )
    problems.append(torchrec_tables.why_not())
    if found := [problem for problem in problems if problem]:
        raise SettingsError.of("train.shard_by is torchrec; recspec's own exchange takes any settings", found)
    return by_row


def _needs_of_gradients(settings: TrainSettings, library: str, more: Mapping[str, bool]) -> Iterator[str]:
    """What needs the gradients of tables, which a library that updates them in the backward pass leaves none of."""
    needs = {
        f"train.clip_norm is {settings.clip_norm}": settings.clip_norm is not None,
        "train.sparse_gradients is never": settings.sparse_gradients == "never",
    }
    for what, is_so in {**more, **needs}.items():
        if is_so:
            yield f"{what}, which needs gradients, and {library} updates tables in the backward pass and leaves none"


def describe_placement(placement: Placement, ranks: Ranks) -> Choice[str]:
    """Where the tables lie, in words."""
    divided = "sharded over the ranks" if placement.plan.pieces and ranks.world_size > 1 else ""
    divided += f" (by TorchRec: {', '.join(sorted(placement.by_torchrec))})" if placement.by_torchrec else ""
    offloaded = f"{', '.join(sorted(placement.offloaded))} in the host's memory" if placement.offloaded else ""
    return Choice("; ".join(filter(None, (divided, offloaded))) or "each rank holds all tables", placement.why)


def pick_embedding_backend(
    meta: MetaModel, settings: TrainSettings, ranks: Ranks, divided: Collection[str]
) -> tuple[Choice[kernels.Backend], tuple[str, ...]]:
    """What looks up and updates embedding tables, and the tables that FBGEMM updates in the backward pass."""
    asked, device = settings.embedding_backend, ranks.device
    if asked == "auto":
        if kernels.uses_triton(None, device):
            return Choice("triton", "this GPU has it"), ()
        return Choice("torch", f"this {device.type} does not run the Triton kernels"), ()
    problems = [kernels.why_not(asked, device)]
    fused: list[str] = []
    if asked == "fbgemm":
        needs = {
            f"train.accumulate is {settings.accumulate}": settings.accumulate > 1,
            "train.compile is true": settings.compile is True,
            f"{ranks.world_size} processes train together": ranks.world_size > 1,
        }
        problems += _needs_of_gradients(settings, "fbgemm", needs)
        fused = [name for name, *_ in meta.tables() if name not in divided]
        problems += [_why_not_fused(meta, name) for name in fused]
    if found := [problem for problem in problems if problem]:
        raise SettingsError.of(f"train.embedding_backend is {asked}; auto takes what is there", found)
    return Choice(asked, "as asked"), tuple(fused)


def _why_not_fused(meta: MetaModel, name: str) -> str | None:
    """The obstacle to FBGEMM's update of a table."""
    if decay := meta.optimizers.settings_of(name).weight_decay:
        return (
            f"{name}: weight_decay is {decay}, which moves every row of a table at every step, and fbgemm updates the "
            f"rows of a batch alone; set train.parts.{name.rpartition('.stores.')[0]}.weight_decay=0"
        )
    try:
        meta.optimizers.fused_update(name)
    except SettingsError as error:
        return str(error)
    return None


def pick_sparse_gradients(
    meta: MetaModel,
    settings: TrainSettings,
    ranks: Ranks,
    *,
    rows_per_step: int,
    divided: Collection[str],
    fused: Collection[str],
) -> Choice[tuple[str, ...]]:
    """The tables whose gradients hold only the rows that a step has seen, unless the step is compiled."""
    asked = settings.sparse_gradients
    if asked == "never":
        return Choice((), "as asked")
    if settings.clip_norm is not None:
        if asked == "always":
            raise SettingsError("train.clip_norm measures whole gradients; leave train.sparse_gradients at auto")
        return Choice((), "train.clip_norm measures whole gradients")
    rows = math.ceil(rows_per_step / ranks.world_size)
    chosen = []
    for name, module, key, store in meta.tables():
        held = store.shape[0] // ranks.world_size if name in divided else store.shape[0]
        pays = sparse_pays(held, store.shape[1], rows * module.ids_per_row(key))
        exact = updates_rows_exactly(meta.optimizers.settings_of(name), from_zero=module.std == 0)
        if name not in fused and (asked == "always" or (pays and exact)):
            chosen.append(name)
    if asked == "always":
        return Choice(tuple(chosen), "as asked")
    if chosen:
        return Choice(tuple(chosen), "a step sees few of their rows, and the optimizer gives the same result")
    return Choice((), "there is no table where this is faster and gives the same result")


def whole_if_compiled(
    sparse: Choice[tuple[str, ...]], meta: MetaModel, settings: TrainSettings, compiled: Choice[CompileMode]
) -> tuple[Choice[tuple[str, ...]], list[str]]:
    """The tables with sparse gradients beside a step that may be compiled, and a note of what whole ones cost."""
    if compiled.value == "none" or settings.sparse_gradients == "always" or not sparse.value:
        return sparse, []
    size = sum(4 * store.numel() for name, _, _, store in meta.tables() if name in sparse.value)
    note = (
        f"a compiled step computes and applies whole gradients, {size:,} bytes for {listed(sparse.value)}, though it "
        "sees few of their rows; train.compile=false or train.sparse_gradients=always is probably faster"
    )
    return Choice((), note), [note]


# --- arithmetic ------------------------------------------------------------------------------------------------------


FASTER = 1.15
"""Speed of products from which a less exact arithmetic is chosen: less would hardly show in a step."""
OF_TF32 = 0.5
"""Share of tf32's speed of products from which bf16 is chosen, because it also halves the bytes of activations. On a
Xeon with AMX, where its products alone reach .8 of tf32's rate, steps of NeuMF, Wide & Deep, DLRM and DCNv2 are 1.1 to
1.6 times as fast as in tf32."""

EventProducts = Literal["onednn", "blas"]


def pick_precision(
    asked: Precision, device: torch.device, shapes: Shapes, rates: Callable[[], ProductRates], *, resumed: object = None
) -> Choice[str]:
    """The arithmetic of a step.

    Args:
        asked: the setting.
        device: where the run trains.
        shapes: those of the model's products.
        rates: those of products on this CPU.
        resumed: the precision of the run that continues, from its checkpoint.
    """
    if asked == "fp16" and device.type == "cpu":
        raise SettingsError("train.precision is fp16, which a CPU does many times slower than fp32; use bf16 or fp32")
    if asked != "auto":
        return Choice(asked, "as asked")
    if resumed in get_args(Precision) and resumed != "auto" and not (resumed == "fp16" and device.type == "cpu"):
        return Choice(str(resumed), "as at the start of the run")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return Choice("bf16", "this GPU multiplies bf16 at full speed")
        return Choice("fp16", "this GPU has fp16 units and no bf16 units")
    if shapes == "changing":
        return Choice("fp32", "products change shape at every step, and bf16 and oneDNN prepare for each new shape")
    measured = rates()
    tf32, bf16 = (measured.speed(each, narrow=shapes == "few") for each in ("tf32", "bf16"))
    if bf16 >= FASTER and bf16 >= tf32 * (OF_TF32 if shapes == "steady" else 1):
        return Choice("bf16", f"this CPU multiplies {bf16:.2g} times as fast as in fp32 (measured; tf32: {tf32:.2g})")
    if tf32 >= FASTER:
        return Choice(
            "tf32", f"this CPU multiplies {tf32:.2g} times as fast through oneDNN (measured; bf16: {bf16:.2g} times)"
        )
    return Choice("fp32", f"this CPU multiplies nothing faster (measured: tf32 {tf32:.2g}, bf16 {bf16:.2g} times)")


def pick_event_products(
    precision: str, device: torch.device, shapes: Shapes, rates: Callable[[], ProductRates], *, resumed: object = None
) -> Choice[EventProducts] | None:
    """What computes the narrow products over events beside `precision`; None where there is nothing to choose.

    Wide products go through oneDNN in tf32 and bf16. Narrow ones take several times as long in some BLAS, and less time
    in others; oneDNN needs even steps, which cost time of their own.
    """
    if device.type != "cpu" or shapes != "few" or precision == "fp32":
        return None
    if resumed in get_args(EventProducts):
        return Choice(cast(EventProducts, resumed), "as at the start of the run")
    measured = rates()
    speed = f"{measured.onednn:.2g}"
    how = "no faster" if speed == "1" else f"{speed} times as fast"
    why = f"this CPU multiplies narrow matrices {how} through oneDNN (measured)"
    if measured.onednn_pays:
        return Choice("onednn", why)
    return Choice("blas", f"{why}; it pays from {ONEDNN_PAYS:g} times on, because it needs steps of even sizes")


def pick_compile(
    settings: TrainSettings, ranks: Ranks, *, sparse: Collection[str], fetched: Collection[str]
) -> Choice[CompileMode]:
    """How the step is compiled.

    CUDA graphs need one GPU and steps that are alike: without sparse gradients and fetched rows.

    Args:
        settings: those of training.
        ranks: the processes that train.
        sparse: the tables that have sparse gradients if the step is not compiled.
        fetched: the tables whose rows are fetched.
    """
    on_gpu, keeps_sparse = ranks.device.type == "cuda", settings.sparse_gradients == "always"
    if settings.compile is not True:
        slower = "uncompiled steps were faster on the GPU that was measured (docs/decisions.md)"
        return Choice("none", slower if on_gpu else "does not pay on a CPU")
    obstacles = {
        f"the run is on {ranks.device.type}": not on_gpu,
        f"{ranks.world_size} processes exchange gradients in every step": ranks.world_size > 1,
        f"train.accumulate is {settings.accumulate}": settings.accumulate > 1,
        "some tables have sparse gradients, or their rows are fetched": bool(fetched or (sparse and keeps_sparse)),
    }
    why_not = next((why for why, is_so in obstacles.items() if is_so), None)
    if why_not is not None:
        return Choice("default", f"as asked; no CUDA graphs: {why_not}")
    return Choice("reduce-overhead", "as asked; full batches have one shape and run as CUDA graphs")


# --- notes -----------------------------------------------------------------------------------------------------------


def notes_of(
    model: Model,
    spec: FeatureSpec,
    settings: TrainSettings,
    ranks: Ranks,
    placement: Placement,
    weights: Choice[str] | None,
) -> Iterator[str]:
    """Effects of the choices that a user may not expect, a line each; the run's log begins with them."""
    size = getattr(model.settings, "max_table_size", None)
    capped = [name for each in model.modules() if isinstance(each, Embeddings) for name in each.rows_of_hashed]
    if size is not None and capped:
        names = listed(dict.fromkeys(capped))
        yield f"settings.max_table_size caps the tables of {names} at {size:,} rows; ids beyond share rows"
    elif size is not None:
        yield f"settings.max_table_size is {size:,}, and no table has more rows: nothing was capped"
    if settings.shard_embeddings == "always" and ranks.world_size == 1:
        yield "train.shard_embeddings is always, and there is one process: nothing to divide; torchrun starts several"
    if settings.shard_by == "torchrec" and not placement.by_torchrec:
        why = "there is one process" if ranks.world_size == 1 else placement.why
        yield f"train.shard_by is torchrec, and no table is divided ({why}), so TorchRec is not used"
    if isinstance(model, TrainedItemModel) and weights is not None and settings.event_weights != "ignore":
        yield f"the weights of events are not used: {weights.reason}"
    if len(spec.labels) > 1:
        learned = "learns" if not isinstance(model, MultiTask) else f"learns {listed(spec.labels)}, and is judged by"
        yield f"the model {learned} the label '{spec.label}'; train.label={spec.labels[1]} takes another"
    if unsaid := spec.leaves_padding_unsaid:
        yield (
            f"{listed(unsaid)} declare no padding, so id 0 counts as an event; if 0 fills them up, as in SIM's "
            "published records, train on what `recspec prepare amazon FOLDER OUT` makes of them"
        )
