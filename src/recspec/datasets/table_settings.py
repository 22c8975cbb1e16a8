"""Settings of your own table: which columns hold what, what events weigh, and how the rows are split."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from recspec.base.config import Duration, build
from recspec.base.errors import listed, unknown
from recspec.data.prepare import (
    EARLIER,
    HELDOUT_USERS,
    SPLIT_WORDS,
    SPLITS,
    WINDOW,
    DeclaredColumn,
    HistorySettings,
    Invalid,
    RawLayout,
    Reading,
    Repeats,
    RowsBy,
    UnknownTargets,
    Weighting,
    check_encoding,
    check_time_format,
    check_window,
    declared_columns,
)


def _words(given: object) -> object:
    """One word in place of a list of one."""
    return given if given is None or isinstance(given, (list, tuple)) else [given]


Word = Annotated[str, Field(coerce_numbers_to_str=True)]
Words = Annotated[tuple[Word, ...] | None, BeforeValidator(_words)]
TypeWeight = Annotated[float, Field(ge=0, le=1e6)]


class SignalSettings(HistorySettings):
    """How much an event counts, by its own number, type and age."""

    negative_history: bool = Field(
        False,
        description="store a drawn negative for each event of a history; with a label, the event that the user skipped "
        "before it, if there is one",
    )
    weight: str | None = Field(
        None, description="column of a number that weighs each event, such as plays, minutes or quantity; 0 drops it"
    )
    event: str | None = Field(
        None, description="column of the type of each event, such as view, cart or purchase; see the next setting"
    )
    event_weights: dict[Word, TypeWeight] = Field(
        {}, description="weight of each type of `event`: {view: 1, cart: 3, purchase: 5}; 0 drops a type"
    )
    half_life: Duration | None = Field(
        None,
        description="time in which the weight of an event halves, counted back from the last event of train, such as "
        "90d or 12h; a plain number is in the units of the timestamps",
    )
    positive: Words = Field(
        None,
        description="the label is 1 where its column holds this text or one of these, else 0; with `event` alone, that "
        "column is the label",
    )

    target: Words = Field(
        None,
        description="types of `event` that are predicted and held out, such as purchase; events of other types are "
        "inputs alone; null: every event is predicted",
    )
    seen: Words = Field(
        None,
        description="types of `event` whose items are left out of recommendations and of rankings; []: of none; null: "
        "those of `target`, without it of every event, whatever its rating or weight",
    )

    dislikes: Words = Field(
        None,
        description="without a label: types of `event` that say that the user does not want the item, such as hide; "
        "they are no interactions, and models that can learn from them do",
    )

    @model_validator(mode="before")
    @classmethod
    def _label_by_type(cls, values: object) -> object:
        """Types that are positive make the column of the types the label."""
        if isinstance(values, Mapping) and values.get("event") and values.get("positive") and "label" not in values:
            return {**values, "label": values["event"]}
        return values

    @model_validator(mode="after")
    def _of_signals(self) -> SignalSettings:
        if self.event_weights and self.event is None:
            raise ValueError("event_weights are of the types of events; name their column with event")
        for name in ("target", "seen", "dislikes"):
            if getattr(self, name) and self.event is None:
                raise ValueError(f"{name} names types of events; name their column with event")
        if self.target == ():
            raise ValueError("target names types of events, one at least; leave it out to predict every event")
        if self.dislikes == ():
            raise ValueError("dislikes names types of events, one at least; leave it out if there are none")
        named = self.event_weights or self.positive or self.seen or self.target or self.dislikes
        if self.event is not None and not named:
            raise ValueError(
                f"event names the column '{self.event}', of which nothing is used; give its types weights "
                "with event_weights, or name those of label 1 with positive, those that are predicted with target, or "
                "those that count as seen with seen"
            )
        if left_out := [kind for kind in self.target or () if self.event_weights.get(kind) == 0]:
            raise ValueError(f"target {listed(left_out)} has weight 0, which leaves its events out; give it a weight")
        if self.event_weights and not any(self.event_weights.values()):
            raise ValueError("event_weights are all 0, so no event is left; give one type a weight above 0")
        return self

    @property
    def weighting(self) -> Weighting:
        """The columns that weigh events."""
        return Weighting(self.weight, self.event, self.event_weights, self.seen_types, self.target)

    @property
    def seen_types(self) -> tuple[str, ...] | None:
        """The types that count as seen; None: all."""
        return self.target if self.seen is None else self.seen


Role = Literal["user", "item", "context"]
ROLE_SETTINGS = ("user", "item", "timestamp", "label", "group", "rating", "splits", "weight", "event")
Split = Literal["leave_one_out", "time", "users", "share", "group", "none"]
ChosenSplit = Split | Literal["given"]
Cardinality = Annotated[int, Field(ge=2, le=2**31)]
Buckets = Annotated[int, Field(ge=2)] | tuple[float, ...]


SEPARATORS = {
    **dict.fromkeys(("\\t", "tab", "tabs"), "\t"),
    **dict.fromkeys(("space", "spaces", "blank", "blanks", "\\s+"), " "),
    "comma": ",",
    "semicolon": ";",
    "pipe": "|",
    "colon": ":",
    "\\|": "|",
}


def _separator(text: object) -> object:
    r"""A separator as people write it: `\t`, `tab`, `comma`, with or without quotes."""
    if not isinstance(text, str):
        return text
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return SEPARATORS.get(text.lower(), text)


def _splits(given: object) -> object:
    """Names of splits as people write them; one file in place of a list of one."""
    if not isinstance(given, Mapping):
        return given
    known = {name: SPLIT_WORDS.get(str(name).lower()) for name in given}
    if strange := [str(name) for name, split in known.items() if split is None]:
        raise ValueError(f"{unknown('split', strange, SPLITS)}; expected such as {{train: train.txt, test: test.txt}}")
    return {known[name]: [files] if isinstance(files, str) else files for name, files in given.items()}


DECIMALS = {"point": ".", "comma": ","}
QUOTES = {"double": '"', "single": "'"}


def _quote(given: object) -> object:
    """A mark around values by its name, or as it is."""
    text = {mark: name for name, mark in QUOTES.items()}.get(given, given) if isinstance(given, str) else given
    if isinstance(text, str) and text not in QUOTES and len(text) != 1:
        raise ValueError(f"'{text}' is no mark; expected double, single, one letter, or null")
    return text


def _decimal(given: object) -> object:
    return {mark: name for name, mark in DECIMALS.items()}.get(given, given) if isinstance(given, str) else given


def _one_column(given: object) -> object:
    """A column without texts by its name."""
    if given is None or isinstance(given, str):
        return {} if given is None else {given: ()}
    if isinstance(given, Mapping) and len(given) > 1:
        raise ValueError(f"names {len(given)} columns; expected one, such as {{availability: [in stock, preorder]}}")
    return given


Stock = Annotated[dict[str, tuple[Word, ...]], BeforeValidator(_one_column)]
Decimal = Annotated[Literal["point", "comma"], BeforeValidator(_decimal)]
Quote = Annotated[str | None, BeforeValidator(_quote)]
Separator = Annotated[str, BeforeValidator(_separator), Field(min_length=1, max_length=4)]
Splits = Annotated[str | dict[str, tuple[str, ...]] | None, BeforeValidator(_splits)]
TimeFormat = Annotated[str, AfterValidator(check_time_format)]
Encoding = Annotated[str, AfterValidator(check_encoding)]
Types = Annotated[str | dict[str, DeclaredColumn], BeforeValidator(declared_columns)]


class SideFile(BaseModel):
    """A file of users or items that is not written as the rows are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str = Field(min_length=1)
    key: str | None = None  # its column of ids, where that has another name than in the rows
    columns: tuple[str, ...] = ()
    separator: Separator | None = None
    quote: Quote = "double"
    decimal: Decimal | None = None
    encoding: Encoding | None = None

    def __str__(self) -> str:
        return self.file


def _side_file(given: object) -> object:
    """A file by its name, or with how it is written. Raises ValueError that names every problem."""
    if not isinstance(given, Mapping):
        return given
    try:
        return SideFile.model_validate(given)
    except ValidationError as error:
        known = ", ".join(SideFile.model_fields)
        told = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ValueError(f"{'; '.join(told)}; expected such as {{file: users.csv, key: id}}; keys: {known}") from None


Side = Annotated[str | SideFile | None, BeforeValidator(_side_file)]


class SideSettings(SignalSettings):
    """Files of users and items, and what their columns are for."""

    users: Side = Field(
        None,
        description="file with one row per user, joined by user id; beside the raw files, or a path; or {file: FILE, "
        "key: COLUMN, encoding: cp1252} with its own key, encoding, separator, quote, decimal or columns",
    )
    items: Side = Field(None, description="likewise one row per item, joined by item id")
    user_columns: tuple[str, ...] = Field(
        (), description="columns of the users' file to keep for display; only these and features are copied"
    )
    title: str | None = Field(None, description="column of the items' file to show to people; `title` if null")
    stock: Stock = Field(
        {},
        description="column of the items' file that tells what can be bought: a number of pieces, or true and false; "
        "or {column: [texts of items in stock]}; by default one named stock, in_stock, available, ...",
    )


class Settings(SideSettings):
    """Settings of your own table."""

    columns: tuple[str, ...] = Field((), description="names of the columns, in order, of a text file without a header")
    user: str | None = Field(
        "user_id", description="column of the user's id, by default also user, customer_id, ...; null if there is none"
    )
    item: str | None = Field(
        "item_id", description="column of the item's id, by default also item, movie_id, ...; null if there is none"
    )
    timestamp: str | None = Field(
        "timestamp", description="column of the time, by default also time, date, ...; null: the order of the rows"
    )
    rating: str | None = Field(None, description="without a label: column of a rating; by default rating, stars, ...")
    min_rating: float | None = Field(
        None, description="rating from which a row is an interaction; if null, three quarters up the scale"
    )
    dislike_below: float | None = Field(
        None, description="rating below which a row is a dislike, as an event of a type in `dislikes` is"
    )
    label: str | None = Field(
        None,
        description="column to predict, 0 or 1; by default label, click, clicked, ...; without one, every row is a 1",
    )
    other_labels: tuple[str, ...] = Field(
        (),
        description="further columns to predict, 0 or 1, for models of several labels, such as purchase beside click",
    )
    positive_from: float | None = Field(None, description="the label is 1 from this number on, else 0")
    split: Split | None = Field(
        None,
        description="if null, without a label leave_one_out, or time if there are `target` and times; with one, group "
        "if set, time if there are times, else share; users: whole users are held out; none: every row is train, for "
        "the final model",
    )
    splits: Splits = Field(
        None,
        description="ready-made splits: a column that says train, valid or test, or files, {train: FILE, test: FILE}",
    )
    valid: float = Field(0.1, ge=0, lt=1, description="share of rows, groups or users for valid, unless leave_one_out")
    test: float = Field(0.1, ge=0, lt=1, description="share of rows, groups or users for test, unless leave_one_out")
    heldout_users: int | None = HELDOUT_USERS
    window: Duration | None = WINDOW
    earlier: int = EARLIER
    group: str | None = Field(None, description="column of the group, whose rows are ranked together; the user if null")
    user_features: tuple[str, ...] = Field((), description="further columns about the user")
    item_features: tuple[str, ...] = Field((), description="further columns about the item")
    context_features: tuple[str, ...] = Field((), description="further columns about the event")
    numeric: tuple[str, ...] = Field((), description="features to take as numbers")
    categorical: tuple[str, ...] = Field((), description="features to take as categories")
    lists: tuple[str, ...] = Field((), description="features with several values per row")
    vectors: tuple[str, ...] = Field(
        (), description="features that are vectors, such as embeddings; by default lists of fractions of one size"
    )
    text: tuple[str, ...] = Field(
        (), description="columns of texts, of rows, users or items, that become a feature NAME_vector"
    )
    text_dim: int = Field(32, ge=1, le=1024, description="how many numbers a text becomes")
    list_separator: str = Field("|", min_length=1, description="separator of the values of a list that is text")
    hashed: dict[str, Cardinality] = Field({}, description="categories and lists to hash: {column: cardinality}")
    buckets: dict[str, Buckets] = Field(
        {}, description="numbers that also become a feature NAME_bucket: {column: [boundaries]} or {column: number}"
    )
    crosses: tuple[tuple[str, ...], ...] = Field((), description="with a label: features to hash together as a_x_b")
    cross_cardinality: Cardinality = Field(10_000, description="number of ids of each cross")
    cut_offs: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="default cut-offs k of `evaluate`")
    separator: Separator | None = Field(
        None, description="separator of a text file's columns, such as tab, :: or space; if null, by the first line"
    )
    quote: Quote = Field(
        "double", description="mark around values of text files, such as double or single; null: quotes are letters"
    )
    decimal: Decimal = Field("point", description="mark before the fraction of numbers in text files")
    encoding: Encoding | None = Field(None, description="encoding of text files, such as cp1252; utf-8 if null")
    layout: RawLayout | None = Field(
        None,
        description="rows, or sequences: a row is a user, then items from the earliest; if null, by the first lines",
    )
    files: tuple[str, ...] = Field((), description="files of the folder RAW to read, in this order; all if empty")
    rows: int | None = Field(None, ge=1, description="number of rows to take; all if null")
    rows_by: RowsBy = Field("first", description="the rows to take: the first, or random ones by the seed")
    types: Types = Field(
        {},
        description="types of columns: {column: text, integer, number, time, list or vector}, or a file of them such "
        "as columns.yaml; ids are text by default",
    )
    invalid_values: Invalid = Field(
        "refuse",
        description="values of another type than their column: refuse them, drop their rows, or take them as missing",
    )
    missing_values: tuple[Annotated[str, Field(coerce_numbers_to_str=True)], ...] = Field(
        (), description="texts that mean a missing value; in numbers n/a, NA, null, none, nan, - and ? always do"
    )
    time_format: TimeFormat | None = Field(
        None,
        description="format of times, such as %m/%d/%Y, or seconds, milliseconds, microseconds or nanoseconds since "
        "1970; null: numbers as they are, or ISO 8601 dates",
    )
    time_features: tuple[Literal["hour", "weekday"], ...] = Field(
        (),
        description="with a label: features of `timestamp`, [hour, weekday], in UTC, or as written where times name "
        "no zone; rows to predict must then hold the time",
    )
    repeats: Repeats = Field(
        "keep",
        description="without a label: keep all of a user's rows for an item, or only the first or the last; sum: the "
        "last, with the weights of all added",
    )
    min_count: int = Field(1, ge=1, description="with a label: values in fewer train rows become unknown")
    min_interactions: int = Field(1, ge=1, description="without a label: users with fewer items are left out")
    num_negatives: int = Field(100, ge=0, description="without a label: candidates beside the positive in each series")
    unknown_targets: UnknownTargets = Field(
        "drop",
        description="split=time without a label: drop or keep (with id 0) held-out rows whose item is not in train",
    )
    unseen_items: bool = Field(
        False, description="without a label: also keep items of the items' file that occur in no row"
    )
    seed: int = Field(1, ge=0, description="seed of the negatives, and of splits by share and group")

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        split = self.chosen_split
        if self.splits is not None and self.split is not None:
            raise ValueError("splits are ready-made and split makes some; leave one of them out")
        if isinstance(self.splits, dict) and "train" not in self.splits:
            raise ValueError(f"splits {listed(self.splits)} lack train; name its file too")
        if isinstance(self.splits, dict) and self.rows is not None and self.rows_by == "first":
            raise ValueError("rows takes the first rows of all files, which are train's; set rows_by=random")
        if isinstance(self.splits, dict) and self.files:
            raise ValueError("files and splits both name files; leave files out")
        if split in ("leave_one_out", "users") and self.label is not None:
            raise ValueError(f"split {split} takes every row as a 1, so goes without a label; pick another split")
        if split == "users" and self.target is not None:
            raise ValueError(
                "split users holds out events whatever their time, which views tell; with target, take time"
            )
        if split != "users" and self.heldout_users is not None:
            raise ValueError("heldout_users is for split users; set split=users too")
        check_window(self.window, self.earlier, split == "time", self.model_fields_set & {"valid", "test"})
        if split in ("share", "group") and self.label is None and "label" in self.model_fields_set:
            raise ValueError(f"split {split} needs a label; name its column, or use leave_one_out or time")
        if self.label is None and (self.user is None or self.item is None) and "label" in self.model_fields_set:
            raise ValueError(f"split {split} needs the columns of user and item, where there is no label")
        if self.label is not None and (given := self.of_interactions):
            raise ValueError(f"{' and '.join(given)}: of rows without a label; leave out the label or these settings")
        if self.unseen_items and (self.items is None or self.label is not None):
            raise ValueError(
                "unseen_items keeps items of the items' file; give it (items=FILE), and leave out the label"
            )
        if self.user_columns and self.users is None:
            raise ValueError("user_columns are of the users' file; give it (users=FILE)")
        if self.min_rating is not None and self.rating is None and "rating" in self.model_fields_set:
            raise ValueError("min_rating needs the column of the rating")
        if self.dislike_below is not None and self.rating is None and "rating" in self.model_fields_set:
            raise ValueError("dislike_below needs the column of the rating")
        if self.min_rating is not None and self.dislike_below is not None and self.dislike_below > self.min_rating:
            raise ValueError(
                f"dislike_below {self.dislike_below:g} is above min_rating {self.min_rating:g}, from which a row is an "
                "interaction; take a lower one"
            )
        if self.other_labels and self.label is None and "label" in self.model_fields_set:
            raise ValueError("other_labels are beside a label; name its column with label")
        labels = [name for name in (self.label, *self.other_labels) if name is not None]
        if doubled := [name for name in dict.fromkeys(labels) if labels.count(name) > 1]:
            raise ValueError(f"{listed(doubled)}: named as a label more than once")
        if leaks := [name for name in labels if name in (self.group, self.user, self.item, *self.features)]:
            raise ValueError(f"{listed(leaks)}: a label; as a feature, an id or the group it would give itself away")
        if self.positive is not None and self.positive_from is not None:
            raise ValueError("positive is for a label of words and positive_from for one of numbers; leave one out")
        if self.half_life is not None and self.timestamp is None:
            raise ValueError("half_life needs the column of the timestamp")
        if self.half_life is not None and self.repeats == "sum":
            raise ValueError(
                "repeats sum counts old events as if they were the last, so half_life could not halve "
                "their weights; take repeats=keep, with which each event keeps its own"
            )
        if self.label is not None and self.history is not None and (self.user is None or self.item is None):
            raise ValueError("history needs the columns of user and item, whose earlier events it holds")
        if self.label is not None and self.history is not None and self.timestamp is None:
            raise ValueError(
                "history of rows with a label needs the column of the timestamp, which tells what a user "
                "did before a row"
            )
        if split == "time" and self.timestamp is None:
            raise ValueError("split time needs the column of the timestamp")
        if split == "group" and self.group is None and self.user is None:
            raise ValueError("split group needs the column of the group, or of the user")
        for name, boundaries in self.buckets.items():
            if not isinstance(boundaries, int) and list(boundaries) != sorted(set(boundaries)):
                raise ValueError(f"the boundaries of '{name}' must rise, found {list(boundaries)}")
        if self.crosses and self.label is None and "label" in self.model_fields_set:
            raise ValueError("crosses need a label; name its column, or leave crosses out")
        for cross in self.crosses:
            if len(set(cross)) < max(2, len(cross)) or self.crosses.count(cross) > 1:
                raise ValueError(f"a cross is of two different features or more and named once, found {list(cross)}")
        given = [name for name in ("label", "context_features", "group") if getattr(self, name)]
        if self.layout == "sequences" and given:
            raise ValueError(f"layout sequences has users and items alone; leave out {' and '.join(given)}")
        if self.valid + self.test >= 1:
            raise ValueError(f"valid and test take {self.valid + self.test:g} of the rows; leave some for train")
        return self

    def rebuilt(self, raw: Path, update: Mapping[str, object]) -> Settings:
        """The settings with others in the place of some, checked. Raises SettingsError if they do not fit."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return build(Settings, f"{raw}: settings", {**given, **update})

    @property
    def reads_times(self) -> bool:
        """Whether a setting other than the split needs times: the decay of weights, and histories of labelled rows."""
        by_time = self.history is not None or bool(self.time_features)
        return self.half_life is not None or (self.label is not None and by_time)

    @property
    def of_interactions(self) -> list[str]:
        """The given settings that only interactions have."""
        of_rows = ("train_negatives", "unknown_targets", "repeats", "rating", "min_rating")
        names = (*of_rows, "target", "dislike_below", "dislikes")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def of_side(self, side: str) -> dict[str, object]:
        """How a file of users or items is read otherwise than the rows, as fields of `Reading`."""
        given = getattr(self, side)
        if not isinstance(given, SideFile):
            return {}
        told = given.model_fields_set
        found = {
            name: value
            for name in told & {*Reading.__dataclass_fields__}
            if (value := getattr(given, name)) is not None
        }
        if given.decimal is not None:
            found["decimal"] = DECIMALS[given.decimal]
        if "quote" in told:
            found |= {"quote": QUOTES.get(given.quote or "", given.quote), "quote_given": True}
        return found

    @property
    def declared(self) -> dict[str, DeclaredColumn]:
        """The declared columns; none while `types` is a file that has not been read."""
        return self.types if isinstance(self.types, dict) else {}

    @property
    def missing_by_column(self) -> dict[str, tuple[str, ...]]:
        """The texts that mean a missing value in a column, where it has its own."""
        return {name: each.missing for name, each in self.declared.items() if each.missing is not None}

    @property
    def reading(self) -> Reading:
        own = {name: getattr(self, name) for name in Reading.__dataclass_fields__ if name in type(self).model_fields}
        own["types"] = self.declared
        files = self.splits if isinstance(self.splits, dict) else {}
        splits = tuple(split for split in SPLITS for _ in files.get(split, ()))
        layout = "rows" if self.label is not None else self.layout
        given = "quote" in self.model_fields_set
        own |= {"splits": splits, "layout": layout, "mentioned": self.mentioned}
        own |= {"quote": QUOTES.get(self.quote or "", self.quote), "quote_given": given}
        own["decimal"] = DECIMALS[self.decimal]
        return Reading(**own)

    @property
    def mentioned(self) -> frozenset[str]:
        """Names of columns in the settings."""
        return frozenset({*self.declared, *self.with_kind, *self.features, *self.with_role})

    @property
    def with_role(self) -> set[str]:
        """The columns that settings of one column name."""
        named = {name for setting in ROLE_SETTINGS if isinstance(name := getattr(self, setting), str)}
        return {*named, *self.other_labels}

    @property
    def with_kind(self) -> set[str]:
        """The features whose kind settings name."""
        kinds = (self.numeric, self.categorical, self.lists, self.vectors, self.text, self.hashed, self.buckets)
        return {*chain(*kinds)}

    @property
    def chosen_split(self) -> ChosenSplit:
        """The given split, or the default one."""
        if self.splits is not None:
            return "given"
        return self.split or ("leave_one_out" if self.label is None else "share")

    @property
    def features(self) -> tuple[str, ...]:
        return (*self.user_features, *self.item_features, *self.context_features)

    @property
    def by_role(self) -> Mapping[Role, tuple[str, ...]]:
        return {"user": self.user_features, "item": self.item_features, "context": self.context_features}
