"""Raw rows to a model's batches, and notes on what the rows lacked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import pyarrow as pa
import torch

from recspec.batch import Batch
from recspec.encoding import (
    UNKNOWN_ID,
    Encoders,
    HashEncoder,
    MissingValues,
    Predictions,
    RequestEncoder,
    VocabularyEncoder,
    count_missing,
    misread_lists,
    out_of_range,
    raw_names,
)
from recspec.errors import nearest
from recspec.evaluation import id_feature
from recspec.inference.catalogue import ROLES, Catalogue, Catalogues, own_id
from recspec.inference.columns import as_tensor, encode_columns, has_column
from recspec.inference.history_columns import HistoryColumns
from recspec.spec import FeatureSpec, signature_of


class RowEncoder:
    """Encodes raw rows for one model: from the rows' columns, or from the catalogues where the rows leave them out."""

    def __init__(
        self,
        spec: FeatureSpec,
        features: Sequence[str],
        encoders: Encoders | None,
        catalogues: Catalogues,
        device: torch.device,
    ) -> None:
        self._spec, self._features, self._encoders = spec, tuple(features), encoders
        self._catalogues, self._device = catalogues, device
        self._histories = HistoryColumns(spec, encoders, catalogues)

    def named(self, rows: pa.Table) -> pa.Table:
        """The rows, their columns' names without blanks around them."""
        return rows if self._encoders is None else rows.rename_columns(self._encoders.named(rows.column_names))

    def encode(self, rows: pa.Table, features: Sequence[str] | None = None) -> tuple[Batch, dict[str, MissingValues]]:
        """Features of raw rows (by default all of the model's), and what was missing or unknown in them.

        Raises:
            DataError: naming every column that is missing, and every value that can't be encoded.
        """
        wanted = self._features if features is None else features
        anonymous = self.anonymous_id(rows.column_names)
        if anonymous is not None:
            rows = rows.append_column(anonymous, pa.nulls(rows.num_rows, pa.string()))
        looked_up = self._from_catalogues(wanted, rows.column_names)
        past = [name for name in wanted if name in self._spec.role("history")]
        given = [name for name in wanted if name not in looked_up and name not in past]
        columns = encode_columns(rows, given, self._spec, self._encoders)
        batch = {name: as_tensor(columns[name], self._spec, name).to(self._device) for name in given}
        for name, (id_name, catalogue) in looked_up.items():
            batch[name] = catalogue.features[name].index_select(0, batch[id_name].long())
        histories, lacking = self._histories.encode(rows, past) if past else ({}, {})
        batch |= {name: as_tensor(column, self._spec, name).to(self._device) for name, column in histories.items()}
        if self._encoders is not None:
            return batch, count_missing(rows, self._encoders, columns) | lacking
        unknown = {name: int((batch[name] == 0).sum()) for name in given if self._may_be_unknown(name)}
        return batch, {name: MissingValues(0, count, UNKNOWN_ID) for name, count in unknown.items() if count}

    def _may_be_unknown(self, name: str) -> bool:
        feature = self._spec.features[name]
        return feature.is_categorical and not feature.is_list and self._spec.reserves_unknown(name)

    def report(
        self,
        rows: pa.Table,
        missing: dict[str, MissingValues],
        unused: tuple[str, ...] = (),
        absent: tuple[str, ...] = (),
    ) -> Predictions:
        """Everything to note on encoded rows, with misread lists and numbers out of range."""
        if self._encoders is None:
            return Predictions(rows.num_rows, missing, {}, unused, absent)
        lists = misread_lists(rows, self._encoders, self._features)
        numbers = out_of_range(rows, self._encoders, self._features)
        return Predictions(rows.num_rows, missing, lists, unused, absent, numbers)

    def unused_columns(self, columns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Raw columns that the model does not read, and the features whose columns may have been meant.

        The label and the group are not counted. Features are named if some column is none of the dataset's, so that
        its name may be mistaken: all features without a column, except an unknown user's id.
        """
        unused = self._unused(columns)
        if {name.strip() for name in unused} <= {*raw_names(self._encoders, self._spec.features)}:
            return unused, ()
        readable = self._readable
        given = (self.anonymous_id(columns), *(name for name in readable if has_column(self._encoders, name, columns)))
        return unused, tuple(name for name in readable if name not in given)

    def _unused(self, columns: Sequence[str]) -> tuple[str, ...]:
        ids = [own for role in ROLES if (own := id_feature(self._spec, role)) is not None]
        read = {*raw_names(self._encoders, [*self._readable, *ids]), self._spec.label, self._spec.group}
        return tuple(name for name in columns if name.strip() not in read)

    @property
    def _readable(self) -> list[str]:
        """The features that rows may give: of a history its items and numbers, as the catalogue knows the others."""
        if self._encoders is None:
            return [*self._features]
        past, items = self._spec.role("history"), self._histories.of_items
        return [name for name in self._features
                if name not in past or name == items or not self._spec.features[name].is_categorical]  # fmt: skip

    def anonymous_id(self, columns: Sequence[str]) -> str | None:
        """The user's id if no column holds it and unknown users have an id; such rows belong to an unknown user.

        None if an unused column has nearly that name, because it was probably meant to hold the id.
        """
        user = id_feature(self._spec, "user") if self._spec.role("user") else None
        if user is None or self._encoders is None or has_column(self._encoders, user, columns):
            return None
        has_unknown = isinstance(self._encoders.encoders.get(user), VocabularyEncoder | HashEncoder)
        return user if has_unknown and not nearest(user, self._unused(columns)) else None

    def can_encode(self, feature: str, columns: Sequence[str], features: Sequence[str]) -> bool:
        """Whether a feature comes from raw columns, or from the catalogue of a user or item among `features`."""
        return (
            has_column(self._encoders, feature, columns)
            or feature == self.anonymous_id(columns)
            or feature in self._from_catalogues(features, columns)
        )

    def _from_catalogues(self, wanted: Sequence[str], columns: Sequence[str]) -> dict[str, tuple[str, Catalogue]]:
        """Features that the rows leave out and a catalogue knows: name -> (id feature, catalogue)."""
        found: dict[str, tuple[str, Catalogue]] = {}
        for role in ROLES:
            if not self._spec.role(role):
                continue
            id_name = own_id(self._spec, role)
            missing = [name for name in self._spec.role(role) if name in wanted and name != id_name
                       and not has_column(self._encoders, name, columns)]  # fmt: skip
            if missing and id_name in wanted:
                catalogue = self._catalogues.of(role)
                found |= {name: (id_name, catalogue) for name in missing if name in catalogue.features}
        return found

    @cached_property
    def request_encoders(self) -> tuple[RequestEncoder, RequestEncoder]:
        """The encoders of clean values, in microseconds: of the request's features, and of the candidates'."""
        items, encoders = {*self._spec.role("item")}, self._encoders or Encoders({}, {})
        inputs = signature_of(self._spec, self._features, "rows").inputs
        request = [port for port in inputs if port.name not in items]
        return RequestEncoder(encoders, request), RequestEncoder(encoders, [p for p in inputs if p.name in items])
