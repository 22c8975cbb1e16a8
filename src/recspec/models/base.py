"""The interface of every model.

Shapes: B rows; R requests (users); N items.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recspec.base import config
from recspec.base.errors import SettingsError, require_extra
from recspec.feature_spec import FeatureSpec
from recspec.models.facts import DataFacts, Proposals
from recspec.models.known_items import SeenIds, Stored
from recspec.models.layers import (
    Batch,
    CalibrationMap,
    Embeddings,
    RowsHeld,
    cross_entropy,
    kernels,
    may_replace,
    num_rows,
    repeat_rows,
    take,
    tile_rows,
)

SCORE_FLOATS = 1 << 22
"""Floats of the widest layer that `score_items` computes at once on a CPU: 16 MB."""

SCORE_BLOCK = 1 << 18
"""Rows that `pair_scores` builds at once: 2^18 rows of some hundred floats take a few hundred MB."""

Shapes = Literal["steady", "few", "changing"]
"""The shapes of a model's products over the steps of a run: the same ones; also narrow products over events, in blocks
of few shapes; or new ones at most steps."""

Value = TypeVar("Value")


def _positive(value: Value) -> Value:
    widths = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    if any(isinstance(width, int) and width < 1 for width in widths):
        raise ValueError("every width is at least 1")
    return value


POSITIVE = AfterValidator(_positive)
"""Refuses a width below 1 in a setting of one or several widths."""
Widths = Annotated[tuple[int, ...], Field(min_length=1), POSITIVE]
UniformStd = Annotated[
    float | None,
    Field(ge=0, description="standard deviation of initial embeddings; null: uniform within 1 / sqrt(rows)"),
]
TableSize = Annotated[
    int | None,
    Field(ge=2, description="maximum rows of a table; ids above it share rows by remainder. null: one row per id"),
]


def list_problems(spec: FeatureSpec, numbers: Sequence[str], who: str) -> list[str]:
    """A sentence for each list of numbers that is no vector, which a model does not take."""
    return [
        f"feature '{name}' is a list of numbers, which {who} does not take; take it out of channel_spec, or say "
        "`vector: true` if every row holds equally many"
        for name in numbers
        if spec.features[name].is_list and not spec.features[name].is_vector
    ]


def scores_of_sums(ours: Tensor, theirs: Tensor, floats: int, score: Callable[[Tensor], Tensor]) -> Tensor:
    """Scores (R, N) of the sums (..., N, D) of requests' parts (R, D) and items' (N, D), `floats` numbers at once."""
    if torch.compiler.is_compiling():  # a program takes any number of items
        return score(ours.unsqueeze(1) + theirs)
    wide = max(1, floats // max(1, theirs.shape[1]))  # items of a block
    step = max(1, wide // max(1, len(theirs)))  # requests of a block
    return torch.cat(
        [
            torch.cat([score(part.unsqueeze(1) + some) for some in torch.split(theirs, wide)], dim=1)
            for part in torch.split(ours, step)
        ]
    )


def counts_of(name: str) -> str:
    """The column with the count of each id of a feature in the whole batch; see `LossNeeds`."""
    return f"{name} (count)"


def require_libraries(model: type[Model]) -> None:
    """Raise `MissingExtraError` unless every library that a model's training needs is installed."""
    for library in model.traits.libraries:
        require_extra(library, "baselines")


TRAINING_SPACE: Mapping[str, object] = MappingProxyType(
    {
        "train.learning_rate": "x0.1..x10 log",
        "train.batch_size": "x0.5..x4 log",
        "train.negatives": "1..16 log",
        "train.negative_distribution": ["uniform", "popularity"],
    }
)
"""Settings of training that are searched for every model trained by gradients; see `Model.space`."""

WIDTHS_SPACE: Sequence[Sequence[int]] = ((64, 32), (128, 64), (256, 128), (512, 256), (512, 256, 128))
"""Widths of an MLP that are searched; wider defaults of large data join them."""

DECAY_SPACE = "0 or 1e-6..0.3 log"
"""Weight decays of embeddings that are searched: far below a step's gradient, up to one that keeps rare ids at 0."""


@dataclass(frozen=True)
class Traits:
    """What sets a model apart."""

    libraries: tuple[str, ...] = ()
    """Libraries of the extra `baselines` that training needs."""
    scores_unseen_items: bool = False
    """Whether it ranks items that training never saw by their features, so that they may be recommended."""
    in_auto: bool = True
    """Whether `auto` tries it without being asked to."""
    scores_by_product: Callable[[Any], bool] = lambda _: False
    """Whether, with these settings, the scores of many users and items are one product of matrices: nanoseconds a
    pair, where an MLP takes a microsecond."""


@dataclass(frozen=True)
class LossNeeds:
    """What the loss of a model reads."""

    features: tuple[str, ...]
    """Names of features besides the label: those of `forward` and its own."""

    negatives: Literal["rows", "columns", "batch", "batch and positives"] = "rows"
    """Where the negatives of a row are.

    - `rows`: each is a row of its own, with label 0.
    - `columns`: each row holds those drawn for it in `drawn_of(item)` and `log_expected_of(item)`, so that it stays
      whole when training splits the batch. No other item feature is drawn.
    - `batch`: the row is compared with the negatives of all rows. Both columns hold the M items of the whole batch
      (B, M), and `drawn_of(name)` every other item feature of the model (B, M, ...), all rows of which are equal. A
      draw that a row is not compared with has an infinite `log_expected_of`.
    - `batch and positives`: the same, with the positives of the batch's rows among the M items.
    """

    counted_features: tuple[str, ...] = ()
    """Names of scalar id features whose ids the loss counts over a whole batch.

    Each part of a split batch holds the column `counts_of(name)` (rows of the part,): the count of each row's id in the
    whole batch. A part without the column is the whole batch.
    """

    dislike_weight: float = 0.0
    """With negatives of the batch: the weight, in those of all items, of an item that the row's user disliked, which is
    one more of the M items for that row alone; 0: none is drawn."""

    @property
    def compares_negatives(self) -> bool:
        """Whether a row is compared with its negatives, which then are not rows of their own."""
        return self.negatives != "rows"

    @property
    def shares_negatives(self) -> bool:
        """Whether a row is compared with the negatives of all rows."""
        return self.negatives in ("batch", "batch and positives")


class Model(nn.Module, ABC):
    """A recommender: built from a specification and its own frozen settings, batch -> logits.

    It opens no file, prints nothing, and knows no device, rank or optimizer. A model must define `name`, `Settings` and
    `forward`. Hooks that it may override: `needs`, `space`, `traits`, `shapes`, `defaults`, `features`, `loss`,
    `loss_needs`, `item_parts`, `side_scores`, `gives_logits` and `allocate_buffers`.

    One class because each method is what training, evaluation or export asks of every model.
    """

    name: ClassVar[str]

    needs: ClassVar[tuple[str, ...]] = ("label",)
    """Roles that the specification must fill."""

    traits: Traits = Traits()

    Settings: ClassVar[type[config.Settings]]
    """The model's own settings."""

    backend: kernels.Backend | None = None
    """What takes rows outside of `Embeddings`; training sets it."""

    space: ClassVar[Mapping[str, object]] = TRAINING_SPACE
    """Values by setting that `recspec tune` searches, in the notation of `--space`.

    A default of the data that lies outside is added. Settings of parts that a model lacks, and those of negatives on
    data that draws none, are left out.
    """

    @classmethod
    def shapes(cls, settings: config.Settings) -> Shapes:  # noqa: ARG003
        """The shapes of the products of training with these settings; products of a batch's events change."""
        return "steady"

    @classmethod
    def defaults(cls, facts: DataFacts) -> Proposals:  # noqa: ARG003
        """Settings of the model and of training that suit the data, each with its reason.

        Names are those of `--set`. A setting that the user gives wins, and the class's default holds for the others.
        """
        return {}

    def __init__(self, spec: FeatureSpec, settings: config.Settings, table_rows: RowsHeld | None = None) -> None:  # noqa: ARG002
        """Build the model with its first values.

        Args:
            spec: the features.
            settings: the model's own settings.
            table_rows: rows of embedding tables that this process holds, for every `Embeddings`; by default all.
        """
        super().__init__()
        spec.require(self.needs, type(self).__name__)
        self.spec = spec
        self.settings = settings
        self.calibration: CalibrationMap | None = None  # of a trained model; see `probabilities`

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Logits (B,) of a batch; they ignore the label."""

    def loss(self, batch: Batch) -> Tensor:
        """The scalar to minimise: mean binary cross-entropy, in nats, plus the model's own terms.

        It is a mean over rows: training splits a batch into micro-batches and among ranks, and the losses of the parts,
        weighted by their rows, must sum to the loss of the batch. A term that depends on rows with equal ids reads the
        ids' counts from `counts_of` (see `LossNeeds`).
        """
        return cross_entropy(self(batch), batch[self.spec.label])

    def features(self) -> tuple[str, ...]:
        """Names of the features that `forward` reads, without the label."""
        return self.spec.inputs()

    def loss_needs(self) -> LossNeeds:
        """What `loss` reads: by default the features of `forward`."""
        return LossNeeds(self.features())

    @final
    def needs_seen_ids(self) -> tuple[str, ...]:
        """Categorical features of which training tells the model the ids that occur in train, by `set_seen_ids`."""
        return tuple(name for part in self.modules() if isinstance(part, SeenIds) for name in part.ids)

    @final
    def set_seen_ids(self, present: Mapping[str, Tensor]) -> None:
        """Learn before the first step which ids (ids,) of the features `needs_seen_ids` occur in the training rows.

        With `LossNeeds.compares_negatives`, in those with a positive label.
        """
        for part in self.modules():
            if isinstance(part, SeenIds):
                part.set_seen_ids(present)

    @final
    def score_items(self, request: Batch, items: Batch) -> Tensor:
        """Logits (R, N) of every item for every request, equal to `forward` on the pairs.

        `request` holds R rows of user, context and history features, `items` N rows of item features.
        """
        requests, candidates = num_rows(request), num_rows(items)
        if not torch.compiler.is_compiling() and not (requests and candidates):  # a program takes any number of items
            return torch.zeros(requests, candidates, device=self.device)
        if not may_replace(self):
            return self.pair_scores(request, items)
        return self.side_scores(request, self.item_parts(items))

    @final
    def scorer(self, items: Batch) -> Callable[[Batch], Tensor]:
        """`score_items` of these items for any number of requests, with what concerns the items alone computed once."""
        parts: list[Any] = []

        def scores(request: Batch) -> Tensor:
            if not num_rows(request) or not num_rows(items) or not may_replace(self):
                return self.score_items(request, items)
            if not parts:
                parts.append(self.item_parts(items))
            return self.side_scores(request, parts[0])

        return scores

    def item_parts(self, items: Batch) -> Any:
        """What `side_scores` reads of items; models that can compute an item's part once override both."""
        return items

    def side_scores(self, request: Batch, items: Any) -> Tensor:
        """`score_items` of a model without hooks, from the `item_parts`."""
        return self.pair_scores(request, items)

    @final
    def pair_scores(self, request: Batch, items: Batch) -> Tensor:
        """`score_items` by `forward` on the pairs."""
        requests, candidates = num_rows(request), num_rows(items)
        if torch.compiler.is_compiling():
            pairs = {**repeat_rows(request, candidates), **tile_rows(items, requests)}
            return cast(Tensor, self(pairs)).view(requests, candidates)
        step = max(1, SCORE_BLOCK // candidates)
        rows = []
        for start in range(0, requests, step):
            block = take(request, slice(start, start + step))
            pairs = {**repeat_rows(block, candidates), **tile_rows(items, num_rows(block))}
            rows.append(self(pairs).view(num_rows(block), candidates))
        return torch.cat(rows)

    @final
    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities of the model's logits, of any shape: the sigmoid of the logits, calibrated if the model is.

        A calibration is increasing, so logits rank as probabilities do.
        """
        return torch.sigmoid(logits if self.calibration is None else self.calibration(logits))

    @final
    def calibrated(self, logits: NDArray[np.floating]) -> NDArray[np.floating]:
        """Calibrated logits of logits in memory, of a model that is calibrated."""
        assert self.calibration is not None
        with torch.inference_mode():
            made: NDArray[np.floating] = self.calibration(torch.from_numpy(logits).to(self.device)).cpu().numpy()
        return made

    @property
    def gives_logits(self) -> bool:
        """Whether `forward` gives logits, whose sigmoid is a probability; otherwise only the order has a meaning.

        A loss that compares a row with its negatives teaches nothing but the order.
        """
        return not self.loss_needs().compares_negatives

    def allocate_buffers(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Size the buffers whose size depends on the data as in a file; returns the problems of their contents."""
        problems = []
        for name, part in self.named_modules():
            if isinstance(part, Stored):
                prefix = f"{name}."
                own = {key.removeprefix(prefix): each for key, each in weights.items() if key.startswith(prefix)}
                problems += [f"weight '{name}': {problem}" for problem in part.allocate_buffers(own)]
        return problems

    @final
    def prepare_for_inference(self) -> None:
        """Compute once what depends on the weights alone, as the model is no longer trained."""
        for part in self.modules():
            prepare = getattr(part, "prepare_for_inference", None)
            if prepare is not None and not isinstance(part, Model):
                prepare()

    @property
    @final
    def device(self) -> torch.device:
        """The device of its batches; tables whose rows are fetched may lie elsewhere."""
        tables = [each for each in self.modules() if isinstance(each, Embeddings)]
        fetched = {id(each.stores[key]) for each in tables for key in each.fetch}
        weights = chain(self.parameters(), self.buffers())
        return next(weight.device for weight in weights if id(weight) not in fetched)

    @final
    def num_parameters(self) -> int:
        """The number of trained weights; of a fitted model, of the weights in its buffers."""
        trained = [each for each in self.parameters() if each.requires_grad]
        return sum(each.numel() for each in trained or self.buffers() if each.is_floating_point())


TIMES = 16
"""How many times as much a GPU takes. A CPU's blocks stay in its caches; a GPU ends an operation on such a block sooner
than the next one is launched."""
SHARE = 64
"""A tensor of a block takes at most one part in so many of a GPU's memory."""


def at_once(number: int, device: torch.device, *, width: int = 1) -> int:
    """Floats, or rows of `width` floats, that a device computes at once: `number` on a CPU, more on a GPU.

    It depends on the GPU's memory, not on what is free, so that the same run has the same blocks.
    """
    if device.type != "cuda":
        return number
    fits = torch.cuda.get_device_properties(device).total_memory // (SHARE * 4 * width)
    return min(TIMES * number, max(number, fits))


Module = TypeVar("Module", bound=nn.Module)

DRAWN = (torch.Tensor.normal_, torch.Tensor.erfinv_, torch.Tensor.clamp_, nn.init.normal_)
"""Operations of fillings that torch (some in 2.11, none in 2.13 but the first) writes in Python for the meta device.

They load its compiler, which takes as long as torch.
"""


class _Undrawn(TorchFunctionMode):
    """Leaves out `DRAWN`, because tensors without memory have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in DRAWN:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def on_meta_device(make: Callable[[], Module]) -> Module:
    """Build a module whose tensors have shapes but no values (torch's meta device).

    Raises:
        SettingsError: if a tensor has more elements than torch can count.
    """
    try:
        with torch.device("meta"), _Undrawn():
            return make()
    except (RuntimeError, TypeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise SettingsError(
            "a tensor of the model would be larger than any memory; make its widths, lengths and cardinalities smaller"
        ) from None
