"""A trained model as a folder that holds everything needed to rebuild it.

bundle.json           model name, settings, how it was trained, what it reached, its calibration and warnings
feature_spec.yaml     the specification, without the training files
weights.safetensors   never pickle
seen.safetensors      which items each user acted on in any split, and how often each item was chosen
events.safetensors    the events of each user in order of time, where the model reads their order
encoders.json, vocabularies/, items.parquet, users.parquet    as `prepare` left them: raw values in, raw ids out
pipeline.json         of a pipeline, whose ranker this is: the candidates, and the retrievers that find them
retrievers/           of a pipeline: a bundle of each retriever, with `index.safetensors` if it has vectors
manifest.json         the SHA-256 of every other file, compared whenever the bundle is opened
evaluations/, run.json, report.html    of a bundle without a run: what is said of it later, outside the manifest
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from recspec import __version__
from recspec.base import config
from recspec.base.errors import BundleError, CheckpointError, DataError, SettingsError, SpecError, listed, nearest
from recspec.base.files import PathError, confined, local, manifest, whole_folder
from recspec.bundle import cards as card_file
from recspec.bundle import versions
from recspec.bundle.cards import Blend, PipelineCard, read_pipeline
from recspec.bundle.checkpoint import Stored, read_tensors, write_tensors
from recspec.bundle.run_record import without_seen
from recspec.bundle.tree_ranker import TreeRanker
from recspec.data.storage import companion_problems, copy_companions
from recspec.feature_spec import (
    FILE_NAME,
    OUTPUTS,
    RANKING_OUTPUTS,
    FeatureSpec,
    find_export_file,
    probability_of,
)
from recspec.loading import Placement, PlacementSettings, Ranks, Shards, divide, place
from recspec.metrics import Calibration
from recspec.models import (
    Interactions,
    ItemModel,
    Model,
    MultiTask,
    UserEvents,
    find_model,
    labels_of,
    on_meta_device,
    problems_of_lists,
)
from recspec.models.layers import CalibrationMap, RowsHeld

OF_MEMBERS: Mapping[str, type[Blend]] = {kind.name: kind for kind in (Blend, TreeRanker)}
"""Models made of other models."""

FORMAT = 1
EVENTS = "events.safetensors"
SHOWN = 5  # runs that a message names


class Card(BaseModel):
    """The content of `bundle.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    recspec: str = __version__
    model: str
    settings: dict[str, object]
    train: dict[str, object] = {}
    trained: dict[str, object] = {}
    metrics: dict[str, dict[str, float]] = {}
    calibration: Calibration | None = None
    """The map that turns the model's logits into calibrated ones."""
    calibrations: dict[str, Calibration] = {}
    """The same of the labels besides the first."""
    warnings: tuple[dict[str, str], ...] = ()
    """What training found wrong with the model: `kind` and `message` of each warning."""


@dataclass(frozen=True)
class Seen:
    """Items that each user acted on: user u's are `items[offsets[u]:offsets[u + 1]]`, ascending."""

    offsets: Tensor
    items: Tensor
    is_seen: Tensor  # whether the item counts as seen, by an event of any split, so that it is not recommended again
    is_known: Tensor  # whether train or valid holds it as a positive, of which the model knows
    counts: Tensor  # how many users' positives each item is: the popularity that ranks items for unknown users

    @classmethod
    def from_interactions(cls, seen: Interactions, known: Interactions) -> Seen:
        """Of the same users and items."""
        both = seen.with_others(known)
        users, items = np.divmod(both.keys, both.num_items)
        flags = (each.contain(users, items) for each in (seen, known))
        return cls(*map(torch.from_numpy, (both.offsets, both.items, *flags, known.counts)))

    def of(self, user: int) -> Tensor:
        """The items that one user has seen."""
        offsets, items = self.lists
        return items[int(offsets[user]) : int(offsets[user + 1])]

    def all_of(self, user: int) -> Tensor:
        """The items that one user has seen, or of which the model knows."""
        return self.items[int(self.offsets[user]) : int(self.offsets[user + 1])]

    def known_of(self, user: int) -> Tensor:
        """The items of one user that the model knows of."""
        own = slice(int(self.offsets[user]), int(self.offsets[user + 1]))
        return self.items[own][self.is_known[own]]

    @cached_property
    def num_known(self) -> Tensor:
        """(U,) number of each user's items that the model knows of."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.is_known.cumsum(0)])[self.offsets.long()].diff()

    @cached_property
    def lists(self) -> tuple[Tensor, Tensor]:
        """The seen items of all users without the others: offsets (U + 1,) and items."""
        if bool(self.is_seen.all()):  # as a rule, and then nothing is copied
            return self.offsets, self.items
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), self.is_seen.cumsum(0)])
        return ends[self.offsets.long()], self.items[self.is_seen]

    @property
    def num_users(self) -> int:
        """Rows of the user table, unknown included."""
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Bundle:
    """A rebuilt model and its sources."""

    model: Model
    card: Card
    spec: FeatureSpec
    folder: Path
    seen: Seen | None = field(default=None, repr=False)
    shards: Shards = field(default_factory=lambda: Shards({}, Placement(), Ranks()), repr=False)
    """The tables that are divided among ranks or lie on the host."""
    pipeline: PipelineCard | None = None
    """What makes it a pipeline, whose ranker the model is; None for a model alone."""
    events_file: Path | None = None

    @cached_property
    def events(self) -> UserEvents | None:
        """The events that the model knows of each user, read at their first use; None where it reads no order.

        Raises:
            BundleError: if the file is damaged.
        """
        try:
            file = self.events_file
            return None if file is None else _events(read_tensors(file)[0], self.spec, file)
        except CheckpointError as error:
            raise BundleError(str(error)) from None

    @property
    def gives_probabilities(self) -> bool:
        """Whether the sigmoid of a logit is the probability of the label: the model learned the labels of rows.

        A model that learned interactions beside drawn negatives only ranks: its rate of positives is the drawing's. An
        item model learns no labels; the line that makes its scores logits does, if valid holds rows of both classes.
        """
        if isinstance(self.model, ItemModel):
            learned = "rows" in self.card.metrics
        else:
            learned = not self.card.train.get("negatives")
        return self.model.gives_logits and learned and not self.spec.has_series

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs of a program made of the model."""
        if not self.gives_probabilities:
            return RANKING_OUTPUTS
        return (*OUTPUTS, *map(probability_of, labels_of(self.model)[1:]))


def save(
    folder: Path,
    model: Model,
    card: Card,
    *,
    seen: Seen | None = None,
    events: UserEvents | None = None,
    weights: Mapping[str, Stored] | Path | None = None,
) -> Path:
    """Write a bundle beside `folder` and rename it into place; an earlier bundle is replaced last.

    `weights` (by default the model's own) are tensors or the file that holds them, such as the best epoch's.

    Raises:
        BundleError: if the bundle can't be written.
    """
    folder = local(folder, "the bundle's folder")
    try:
        with whole_folder(folder) as temporary:
            spec = without_seen(model.spec).replace(sources={})
            copy_companions(spec, temporary)
            spec.save(temporary)
            if isinstance(weights, Path):
                read_tensors(weights, rows=lambda _: ())  # refuses a damaged file
                shutil.copyfile(weights, temporary / "weights.safetensors")
            else:
                own = model.state_dict() if weights is None else weights
                write_tensors(temporary / "weights.safetensors", own, {"format": FORMAT})
            if seen is not None:
                tensors = {each.name: getattr(seen, each.name) for each in fields(Seen)}
                write_tensors(temporary / "seen.safetensors", tensors, {"format": FORMAT})
            if events is not None:
                write_events(temporary, events)
            (temporary / "bundle.json").write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
            manifest.write(temporary)
    except (OSError, CheckpointError, DataError, SpecError) as error:
        raise BundleError(f"{folder}: the bundle could not be written: {error}") from None
    return folder


def write_events(folder: Path, events: UserEvents) -> None:
    """Write the events of each user into a bundle's folder, whose manifest then lacks them."""
    held = {name: torch.from_numpy(each) for name, each in vars(events).items() if each is not None}
    write_tensors(folder / EVENTS, held, {"format": FORMAT})


def load(
    path: str | Path, *, device: torch.device | None = None, ranks: Ranks | None = None, verify: bool = True
) -> Bundle:
    """Rebuild the model of a bundle, or of a run folder that holds one, ready to score.

    With `ranks` the tables are divided among them as in training, if the training settings and this machine's memory
    ask for it; each rank reads the rows that it holds. Without `ranks` one process answers alone. Tables that a GPU
    can't hold stay on the host. With `verify` every file is compared with the bundle's manifest first. The files'
    contents are checked against each other in any case.

    Raises:
        BundleError: if the folder holds no bundle, or a damaged one.
    """
    folder = find(local(path, "the bundle"))
    if verify:
        manifest.check(folder)
    card = read_card(folder)
    try:
        model_class = OF_MEMBERS.get(card.model) or find_model(card.model)
    except SettingsError as error:
        own = "a model of your own needs its package here, or an entry in recspec.models.MODELS"
        raise BundleError(f"{folder}: {error}; {own}") from None
    spec = _read_spec(folder)
    settings = config.build(model_class.Settings, f"{folder / 'bundle.json'}: settings", card.settings)

    def make(table_rows: RowsHeld | None) -> Model:
        return model_class(spec, settings, table_rows)

    here = ranks or Ranks(device=device or torch.device("cpu"))
    placement = place(make, here, _placement_settings(card, folder, here), lambda _, width: 4 * width)

    def rows(name: str) -> Sequence[range] | None:
        return placement.plan.held(name, here.rank) if name in placement.plan.stores else None

    try:
        weights, _ = read_tensors(confined(folder, "weights.safetensors"), rows)
        seen_file = confined(folder, "seen.safetensors")
        seen = _seen(read_tensors(seen_file)[0], spec, seen_file) if seen_file.exists() else None
        events_file = confined(folder, EVENTS)
    except (CheckpointError, PathError) as error:
        raise BundleError(str(error)) from None
    model = on_meta_device(lambda: make(placement.held_by(here.rank)))
    _assign(model, weights, folder)
    shards = divide(model.eval(), here, placement)
    if card.calibration is not None:
        model.calibration = CalibrationMap(card.calibration).to(model.device)
    if isinstance(model, MultiTask):
        model.calibrations = {name: CalibrationMap(each).to(model.device) for name, each in card.calibrations.items()}
    events = events_file if events_file.exists() else None
    return Bundle(model, card, spec, folder, seen, shards, read_pipeline(folder), events)


def find(path: Path) -> Path:
    """The bundle's folder at a path that a user gave: the bundle itself, or the newest one of the run that holds it.

    Raises:
        BundleError: with what is there instead.
    """
    if not (path / "bundle.json").is_file() and (updated := versions.newest(path)) is not None:
        return updated
    for folder in (path, path / "bundle"):
        if (folder / "bundle.json").is_file():
            return folder
    if not path.exists():
        known = [found.name for found in path.parent.iterdir()] if path.parent.is_dir() else []
        raise BundleError(f"{path}: no such folder{nearest(path.name, known)}")
    if (path / "checkpoints").is_dir():
        raise BundleError(f"{path}: this run has checkpoints but no bundle yet; finish it with train --resume")
    raise BundleError(f"{path}: {_instead(path)}")


def _instead(path: Path) -> str:
    """The kind of a folder without a bundle, and the folder to give instead."""

    def exports_in(repository: Path) -> list[str]:
        files = repository.glob("*/config.pbtxt")
        return sorted(str(file.parent) for file in files if find_export(file.parent) is not None)

    if find_export(path) is not None:
        return (
            "is an export, which knows features and no raw values; give the run that it was made of (`recspec serve` "
            "and `recspec bench infer` take exports)"
        )
    if exports := exports_in(path):
        return (
            "is a Triton model repository; give the run that it was made of (`recspec serve` and `recspec bench infer` "
            f"take {listed(exports)})"
        )
    if (path / "config.pbtxt").is_file():
        beside = listed(exports_in(path.parent))
        return f"is a model of a Triton repository that holds no program; beside it: {beside}"
    if (path / FILE_NAME).is_file():
        return "is a prepared dataset; give the run of a model that was trained on it"
    runs = sorted(str(file.parent.parent) for file in path.glob("*/bundle/bundle.json"))
    runs += sorted(str(file.parent) for file in path.glob("*/bundle.json"))
    there = f"; in it there are {listed(runs[:SHOWN])}, so name one" if runs else ""
    return f"not a trained model: neither bundle.json nor bundle/bundle.json is there{there}"


def find_export(path: Path) -> Path | None:
    """The folder of an export, or of the newest version of a repository's model; None if there is neither."""
    versions = [each for each in path.glob("[0-9]*") if each.name.isdecimal()]
    newest_first = sorted(versions, key=lambda each: int(each.name), reverse=True)
    return next((folder for folder in (path, *newest_first) if find_export_file(folder) is not None), None)


def read_card(folder: Path) -> Card:
    """The content of bundle.json.

    Raises:
        BundleError: if it is damaged or was written in another format.
    """
    card = card_file.read(folder, "bundle.json", Card, what="bundle", version=FORMAT)
    if card is None:
        raise BundleError(f"{folder / 'bundle.json'}: no such file")
    return card


def _read_spec(folder: Path) -> FeatureSpec:
    """The specification of a bundle, whose vocabularies and catalogues have one entry for each id."""
    try:
        confined(folder, FILE_NAME)
        spec = FeatureSpec.load(folder)
    except PathError as error:
        raise BundleError(f"{folder}: {error}") from None
    BundleError.refuse(str(folder), companion_problems(spec))
    return spec


def _seen(tensors: Mapping[str, Tensor], spec: FeatureSpec, file: Path) -> Seen:
    """Check tensors against the specification's users and items."""
    names = [each.name for each in fields(Seen)]
    if sorted(tensors) != sorted(names):
        raise BundleError(f"{file}: holds {listed(sorted(tensors))}; expected {listed(names)}")
    kinds = {name: (torch.bool,) if name.startswith("is_") else (torch.int32, torch.int64) for name in names}
    problems = [
        f"'{name}' is {tensor.dtype} of shape {tuple(tensor.shape)}; expected "
        f"{' or '.join(str(each).removeprefix('torch.') for each in kinds[name])} in one dimension"
        for name, tensor in tensors.items()
        if tensor.dim() != 1 or tensor.dtype not in kinds[name]
    ]
    BundleError.refuse(str(file), problems)
    seen = Seen(**tensors)
    users, items = spec.num_ids(spec.user_id), spec.num_ids(spec.item_id)
    if seen.num_users != users:
        problems.append(f"'offsets' holds {len(seen.offsets)} numbers; expected {users + 1}, one more than users")
    else:
        problems += problems_of_lists(seen.offsets, seen.items, items)
    problems += [
        f"'{name}' holds {len(tensors[name])} numbers; expected {len(seen.items)}, one for each of 'items'"
        for name in ("is_seen", "is_known")
        if len(tensors[name]) != len(seen.items)
    ]
    if len(seen.counts) != items or bool((seen.counts < 0).any()):
        problems.append(f"'counts' holds {len(seen.counts)} numbers; expected {items}, one for each item, 0 or more")
    BundleError.refuse(str(file), problems)
    return seen


def _events(tensors: Mapping[str, Tensor], spec: FeatureSpec, file: Path) -> UserEvents:
    """Check tensors against the specification's users and items."""
    kinds = {"offsets": torch.int64, "items": torch.int32, "times": torch.float64, "weights": torch.float32}
    problems = [f"lacks '{name}'" for name in ("offsets", "items") if name not in tensors]
    problems += [
        f"'{name}' is {each.dtype} of shape {tuple(each.shape)}; expected {kinds.get(name, 'no such tensor')}"
        for name, each in tensors.items()
        if each.dtype != kinds.get(name) or each.dim() != 1
    ]
    if not problems:
        offsets, items = tensors["offsets"], tensors["items"]
        if len(offsets) != (users := spec.num_ids(spec.user_id)) + 1:
            problems.append(f"'offsets' holds {len(offsets)} numbers; expected {users + 1}, one more than users")
        else:
            problems += problems_of_lists(offsets, items, spec.num_ids(spec.item_id))
        problems += [
            f"'{name}' holds {len(each)} numbers; expected {len(items)}, one for each of 'items'"
            for name, each in tensors.items()
            if name not in ("offsets", "items") and len(each) != len(items)
        ]
        problems += [
            f"'{name}' holds numbers that are not finite"
            for name, each in tensors.items()
            if each.is_floating_point() and not bool(each.isfinite().all())
        ]
    BundleError.refuse(str(file), problems)
    return UserEvents(**{name: each.numpy() for name, each in tensors.items()})


def _placement_settings(card: Card, folder: Path, ranks: Ranks) -> PlacementSettings:
    """The training settings that apply here: a lone process divides nothing, and a CPU is the host."""
    own = {name: card.train[name] for name in PlacementSettings.model_fields if name in card.train}
    settings = config.build(PlacementSettings, f"{folder / 'bundle.json'}: train", own)
    unused = {"shard_embeddings"} if ranks.world_size == 1 else set()
    unused |= {"offload_embeddings"} if ranks.device.type == "cpu" else set()
    return settings.model_copy(update=dict.fromkeys(unused, "never"))


def _assign(model: Model, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Give a model built without memory its weights; every name and shape must agree."""
    problems = model.allocate_buffers(weights)
    expected = model.state_dict()
    problems += [f"weight '{name}' is missing" for name in expected if name not in weights]
    for name, tensor in weights.items():
        wanted = expected.get(name)
        if wanted is None:
            problems.append(f"weight '{name}' is not the model's")
        elif tensor.shape != wanted.shape:
            has, expected_shape = tuple(tensor.shape), tuple(wanted.shape)
            problems.append(f"weight '{name}' has shape {has}; the model expects {expected_shape}")
        if wanted is not None and tensor.dtype != wanted.dtype:
            problems.append(f"weight '{name}' is {tensor.dtype}; the model expects {wanted.dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            problems.append(f"weight '{name}' holds {bad:,} numbers that are not finite")
    BundleError.refuse(str(folder / "weights.safetensors"), problems)
    model.load_state_dict(weights, assign=True)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "a model hides a tensor"
