"""The encoders of a dataset with their vocabularies: raw rows to prepared columns, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from recspec.encoding.encoder_kinds import (
    ENCODERS,
    CrossEncoder,
    Encoder,
    NumberEncoder,
    ScaleEncoder,
    VocabularyEncoder,
    encode,
)
from recspec.encoding.raw_columns import RawValues
from recspec.encoding.raw_values import Ids, Lists, Raw, encode_ids
from recspec.encoding.vocabulary import Vocabulary
from recspec.errors import DataError, listed, nearest, unknown
from recspec.files import PathError, confined, read_text, whole_file

ENCODERS_FILE = "encoders.json"
VOCABULARIES = "vocabularies"


def read_encoders(folder: Path) -> dict[str, Encoder]:
    """What `encoders.json` says, by feature.

    Raises:
        DataError: if the file is missing or not what it should be.
    """
    path = folder / ENCODERS_FILE
    if not path.exists():
        raise DataError(f"{path}: no such file; raw values can't be encoded without it")
    try:
        return ENCODERS.validate_json(read_text(confined(folder, ENCODERS_FILE)))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, found['loc'])) or 'the file'}: {found['msg']}" for found in error.errors()]
        raise DataError.of(str(path), problems) from None


@dataclass(frozen=True)
class Encoders:
    """How each feature's raw values become prepared ones, with the vocabularies this takes."""

    encoders: Mapping[str, Encoder]
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Encoders:
        """Read `encoders.json` and the vocabularies it names.

        Raises:
            DataError: if a file is missing or not what it should be.
        """
        encoders = read_encoders(folder)
        names = {encoder.vocabulary for encoder in encoders.values() if isinstance(encoder, VocabularyEncoder)}
        try:
            files = {name: confined(folder, f"{VOCABULARIES}/{name}.parquet") for name in sorted(names)}
        except PathError as error:
            raise DataError(f"{folder / ENCODERS_FILE}: {error}") from None
        return cls(encoders, {name: Vocabulary.load(file) for name, file in files.items()})

    def save(self, folder: Path) -> None:
        """Write `encoders.json` and every vocabulary."""
        data = {name: _without_defaults(encoder) for name, encoder in self.encoders.items()}
        (folder / VOCABULARIES).mkdir(parents=True, exist_ok=True)
        with whole_file(folder / ENCODERS_FILE) as temporary:
            temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        for name, vocabulary in self.vocabularies.items():
            vocabulary.save(confined(folder, f"{VOCABULARIES}/{name}.parquet"))

    def vocabulary_of(self, feature: str) -> Vocabulary:
        """The vocabulary that a categorical feature's raw values are looked up in.

        Raises:
            DataError: if the feature is unknown, a number, or hashed.
        """
        encoder = self.encoder(feature)
        if not isinstance(encoder, VocabularyEncoder):
            what = "a number" if isinstance(encoder, (NumberEncoder, ScaleEncoder)) else f"encoded by {encoder.kind}"
            raise DataError(f"feature '{feature}' is {what}; it has no vocabulary")
        return self.vocabularies[encoder.vocabulary]

    def encode(self, table: pa.Table, features: Iterable[str] | None = None) -> dict[str, NDArray[np.generic] | Lists]:
        """Prepared columns of raw rows: arrays, and for lists values and offsets.

        A raw column may bear the feature's name or the name it had in the raw files.

        Args:
            features: Which to encode; all by default.

        Raises:
            DataError: naming every column that is missing, and every value that is not a number where one must be.
        """
        wanted = list(self.encoders if features is None else features)
        found = table.column_names
        missing = self._missing(wanted, found)
        problems = [f"no column '{column}'{needed}{nearest(column, found)}" for column, needed in missing.items()]
        encoded: dict[str, NDArray[np.generic] | Lists] = {}
        for name in wanted:
            sources = [source for source in self.sources(name, found) if source is not None]
            if self.can_encode(name, found):
                try:
                    encoded[name] = encode(
                        self.encoders[name], [table.column(source) for source in sources], self.vocabularies, sources
                    )
                except DataError as error:  # a bad cell is one problem, however many features are made from it
                    where = "" if isinstance(self.encoders[name], CrossEncoder) else f"column '{sources[0]}': "
                    problems += [f"{where}{problem}" for problem in error.problems]
        if problems:
            refused = DataError.of("raw rows", problems)
            between = "; " if len(refused.problems) == 1 else "\n  "
            raise DataError(f"{refused}{between}found {listed(found)}", refused.problems) if missing else refused
        return encoded

    def encode_column(self, feature: str, values: RawValues) -> NDArray[np.generic] | Lists:
        """The prepared column of a feature that is made from one raw column.

        Raises:
            DataError: for a value that is not a number where one must be, naming its row.
        """
        return encode(self.encoder(feature), [values], self.vocabularies, None)

    def encode_values(self, feature: str, values: Sequence[Raw], *, are_texts: bool) -> Ids:
        """The ids of a few values, all texts or all whole numbers (or None), as `encode_column` gives them."""
        encoder = self.encoders[feature]
        known = self.vocabularies[encoder.vocabulary] if encoder.kind == "vocabulary" else None
        return encode_ids(encoder, values, known, are_texts=are_texts)

    def named(self, columns: Sequence[str]) -> list[str]:
        """Names of raw columns without the blanks around them, as in files that separate values by ", ".

        A name stays as it is where a feature is made from exactly that name, or where two names would become equal.
        """
        made_from = {*self.encoders}
        for encoder in self.encoders.values():
            made_from |= {*encoder.columns} if isinstance(encoder, CrossEncoder) else {encoder.column or ""}
        plain = [name if name in made_from else name.strip() for name in columns]
        return [name if plain.count(short) > 1 else short for name, short in zip(columns, plain, strict=True)]

    def can_encode(self, feature: str, columns: Sequence[str]) -> bool:
        """Whether the raw columns that a feature is made from are all there."""
        return None not in self.sources(feature, columns)

    def encoder(self, feature: str) -> Encoder:
        """The encoder of a feature.

        Raises:
            DataError: if there is none, with the nearest name.
        """
        if feature not in self.encoders:
            raise DataError(unknown("feature", feature, self.encoders))
        return self.encoders[feature]

    def sources(self, feature: str, columns: Sequence[str]) -> list[str | None]:
        """The names here of the columns that a feature is made from; None for each that is missing."""
        encoder = self.encoder(feature)
        if isinstance(encoder, CrossEncoder):
            return [self._renamed(raw, columns) for raw in encoder.columns]
        return [next((name for name in (feature, encoder.column) if name in columns), None)]

    def _renamed(self, raw: str, columns: Sequence[str]) -> str | None:
        """The name of a raw column here: its own, or that of a feature made from this column alone."""
        if raw in columns:
            return raw
        same = (name for name, encoder in self.encoders.items() if not isinstance(encoder, CrossEncoder)
                and encoder.column == raw and name in columns)  # fmt: skip
        return next(same, None)

    def _missing(self, features: Iterable[str], columns: Sequence[str]) -> dict[str, str]:
        """Each missing column once, with the feature that needs it where its name does not say so."""
        missing: dict[str, str] = {}
        for name in features:
            encoder = self.encoder(name)
            if isinstance(encoder, CrossEncoder):
                raw = encoder.columns
            else:  # buckets of a number are made from the number's column, whatever their own name
                raw = (encoder.column if encoder.column is not None and encoder.column in self.encoders else name,)
            for column, source in zip(raw, self.sources(name, columns), strict=True):
                if source is None:
                    missing.setdefault(column, "" if column == name else f" that '{name}' is made from")
        return missing


def _without_defaults(encoder: Encoder) -> dict[str, object]:
    """An encoder's kind and the settings that differ from their defaults, as the file keeps them."""
    defaults = {name: field.default for name, field in type(encoder).model_fields.items() if name != "kind"}
    settings = encoder.model_dump(mode="json").items()
    return {name: value for name, value in settings if name not in defaults or getattr(encoder, name) != defaults[name]}


def raw_names(encoders: Encoders | None, features: Iterable[str]) -> Iterator[str]:
    """The possible names of the raw columns that features are made from."""
    for feature in features:
        encoder = encoders.encoders.get(feature) if encoders is not None else None
        if encoder is None or encoders is None:
            yield feature
        elif isinstance(encoder, CrossEncoder):
            yield from encoder.columns
            yield from (name for name, other in encoders.encoders.items()
                        if not isinstance(other, CrossEncoder) and other.column in encoder.columns)  # fmt: skip
        else:
            yield from (feature, encoder.column or feature)
