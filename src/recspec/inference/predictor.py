"""Predictor: a trained model that takes raw rows and users, and gives probabilities and items."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recspec.bundle import Bundle
from recspec.bundle import folder as bundle
from recspec.data.encoding import Encoders, MissingValues, Predictions
from recspec.feature_spec import PROBABILITY, probability_of
from recspec.inference.catalogue import Catalogue, Catalogues, Role
from recspec.inference.item_changes import ItemChanges
from recspec.inference.live_events import LiveEvents
from recspec.inference.new_items import bind, with_new_items
from recspec.inference.pipeline import Pipeline
from recspec.inference.recommendation import Recommendation, RecommendRequest, SimilarItems
from recspec.inference.recommender import Recommender, similar
from recspec.inference.request_features import RowEncoder
from recspec.inference.row_explanations import RowExplainer
from recspec.loading import pick_device
from recspec.models import labels_of, logits_of_labels, probabilities_of_labels
from recspec.models.layers import Batch, take

Values = dict[str, NDArray[Any]]
"""Columns of B values by name."""

SCORE = "score"
ROWS = 65_536
"""Rows read, scored and written at once."""


class Predictor:
    """A trained model with what `prepare` fitted, so that it takes raw values.

    Unknown values get id 0 and are reported. An unknown user gets the most popular items. One class because commands,
    server and Python ask the same model.
    """

    def __init__(self, trained: Bundle, device: torch.device, changes: ItemChanges | None = None) -> None:
        self._trained, self.spec, self.device = trained, trained.spec, device
        trained.model.eval().prepare_for_inference()
        self.encoders = Encoders.load(trained.folder) if trained.spec.metadata.get("encoders") else None
        self._take(changes)

    def _take(self, changes: ItemChanges | None) -> None:
        """Read the catalogue of items with these changes."""
        self.held: dict[str, Any] = {}
        """What callers made from it and want to keep as long."""
        bound = None if changes is None else bind(changes, self.spec, self.encoders, self._trained)
        self.bundle = self._trained if bound is None else with_new_items(self._trained, bound)
        self.model = self.bundle.model
        self.catalogues = Catalogues(self.spec, self.encoders, self.device, bound)
        self.row_encoder = RowEncoder(self.catalogues, self.model.features())

    @classmethod
    def open(
        cls, path: str | Path, *, device: str = "auto", verify: bool = True, origin: Path | None = None
    ) -> Predictor:
        """Open a bundle, or a run that holds one; with `verify`, compare its files with its manifest.

        What changed of the items of the run since, by `recspec catalogue`, is read too. `origin` is the bundle of which
        `path` is a copy.

        Raises:
            BundleError: if there is none, or it is damaged.
        """
        chosen = pick_device(device)
        trained = bundle.load(path, device=chosen, verify=verify)
        return cls(trained, chosen, ItemChanges.of_bundle(origin or trained.folder))

    def with_changes(self, changes: ItemChanges | None) -> Predictor:
        """The same model after other changes of items, of which only the catalogue is read again."""
        other, read = copy(self), vars(self.catalogues).get("users")
        pipeline = self.pipeline
        for name in ("recommender", "pipeline"):
            vars(other).pop(name, None)
        other._take(changes)
        if read is not None:
            vars(other.catalogues)["users"] = read
        if pipeline is not None:
            vars(other)["pipeline"] = pipeline.with_changes(other.bundle, other.catalogues.changes)
        return other

    def predict(self, rows: pa.Table) -> tuple[NDArray[np.float32], Predictions]:
        """The value (B,) of `column` for each of B raw rows, and a report on what was unknown in them.

        Raises:
            DataError: see `predict_labels`.
        """
        values, found = self.predict_labels(rows)
        return values[self.column], found

    def predict_labels(self, rows: pa.Table, *, explain: bool = False) -> tuple[Values, Predictions]:
        """The values (B,) of `columns_added` for B raw rows, and a report on what was unknown in them.

        A user's or item's own features may be left out where the catalogue knows them.

        Raises:
            DataError: naming every column that is missing, and every value that can't be encoded.
            RequestError: with `explain`, for a model whose rows can't be explained.
        """
        rows = self.row_encoder.named(rows)
        batch, missing = self.encode(rows)
        values = self.predict_batch(batch, rows.num_rows, explain=explain)
        found = self.row_encoder.report(rows, missing, *self.row_encoder.unused_columns(rows.column_names))
        found.not_finite = int(np.count_nonzero(~np.isfinite(values[self.column])))
        return values, found

    def encode(self, rows: pa.Table, features: Sequence[str] | None = None) -> tuple[Batch, dict[str, MissingValues]]:
        """Features of raw rows, by default all of the model's, and what was missing or unknown in them."""
        return self.row_encoder.encode(rows, features)

    @property
    def column(self) -> str:
        """What rows are given: `probability` of the label, or `score` of a model that only ranks."""
        return PROBABILITY if self.bundle.gives_probabilities else SCORE

    @property
    def columns(self) -> tuple[str, ...]:
        """`column`, and for a model of several labels the probabilities of the others."""
        others = labels_of(self.model)[1:] if self.bundle.gives_probabilities else ()
        return (self.column, *map(probability_of, others))

    def columns_added(self, *, explain: bool = False) -> tuple[str, ...]:
        """`columns`, and with `explain` those of explanations."""
        return (*self.columns, *(self.row_explainer.names if explain else ()))

    @cached_property
    def row_explainer(self) -> RowExplainer:
        """Explains probabilities of rows. Raises `RequestError` for a model whose rows can't be explained."""
        return RowExplainer(self.model, self.encoders)

    def predict_batch(self, batch: Batch, num_rows: int, *, explain: bool = False) -> Values:
        """The values (B,) of `columns_added` for the rows of a batch of any size."""
        with torch.inference_mode():
            blocks = [take(batch, slice(at, at + ROWS)) for at in range(0, num_rows, ROWS)]
            parts = [logits_of_labels(self.model, block) for block in blocks]
            logits = torch.cat(parts) if parts else torch.zeros(0, len(self.columns))
            values = probabilities_of_labels(self.model, logits) if self.bundle.gives_probabilities else [logits]
            explained = self.row_explainer.explain(batch).to_columns() if explain else {}
        return {
            **{name: each[:, 0].cpu().numpy() for name, each in zip(self.columns, values, strict=True)},
            **explained,
        }

    @cached_property
    def recommender(self) -> Recommender:
        """Scores every item for users, baskets and contexts."""
        return Recommender(self.bundle, self.catalogues, self.row_encoder, self.pipeline)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The retrievers of a pipeline, whose ranker is the model; None for a model alone."""
        if self.bundle.pipeline is None:
            return None
        found = Pipeline.open(self.bundle)
        return found if self.catalogues.changes is None else found.with_changes(self.bundle, self.catalogues.changes)

    def recommend(
        self,
        wanted: RecommendRequest | Sequence[str | int],
        *,
        k: int = 10,
        include_seen: bool = False,
        live: LiveEvents | None = None,
    ) -> list[Recommendation]:
        """The k best items for each user, best first, without those the user acted on.

        `wanted` is a whole request, or only raw user ids. Equal scores are ordered by id. Items without interactions in
        training are left out, unless the model scores items by their features. An unknown user is answered by the
        basket or the context of the request, by their `live` events, and without them by the most popular items;
        `known` is False.

        `live` holds what the users did beside what the dataset holds: the answer is that of a bundle whose dataset held
        these events.

        Raises:
            RequestError: with every problem of the request.
        """
        if not isinstance(wanted, RecommendRequest):
            wanted = RecommendRequest(users=tuple(wanted), k=k, include_seen=include_seen)
        return self.recommender.recommend(wanted, live)

    def similar(
        self,
        item: str | int | RecommendRequest,
        *,
        k: int = 10,
        filter: str | None = None,
        exclude: Sequence[str | int] = (),
    ) -> SimilarItems:
        """The k items most like one, by raw id: by the model's vectors of items, or its scores for a basket of it.

        `item` is a raw id, or a whole request whose basket is one item.

        Raises:
            RequestError: with every problem of the request.
        """
        if not isinstance(item, RecommendRequest):
            item = RecommendRequest(items=(item,), k=k, filter=filter, exclude=tuple(exclude))
        return similar(self.recommender, self.bundle, self.catalogues, item)

    def liked(self, user: str | int, *, k: int = 5) -> list[str]:
        """Titles (or raw ids) of some items the user acted on, the most popular first."""
        return [item.title or str(item.item) for item in self.recommender.liked(user, k=k)]

    def busiest_user(self) -> str | int:
        """The raw id of the user who acted on most items."""
        return self.recommender.busiest_user()

    @property
    def users(self) -> Catalogue:
        """Every user, in order of id."""
        return self.catalogues.users

    @property
    def items(self) -> Catalogue:
        """Every item, in order of id."""
        return self.catalogues.items

    def raw_ids(self, role: Role, ids: NDArray[np.int64]) -> pa.Array:
        """Raw values of prepared ids (N,) of users or items."""
        return self.catalogues.raw_ids(role, ids)


def note_of_scores(predictor: Predictor) -> str:
    """Why rows are given scores; empty if they are given probabilities."""
    if predictor.bundle.gives_probabilities:
        return ""
    name = predictor.bundle.card.model
    return f"{name} gives scores, which are no probabilities; only the order of a user's scores counts"
