"""Metrics of rows by their scores, and by slice: new and old users, head and tail items, values of a column.

A slice of users or rows holds their groups or rows. A slice of items holds the positives of those items, and of rows
all rows of those items. Candidates stay what they are: a target of the tail is ranked among head items too. Columns are
features of the dataset, and raw columns of its catalogues.

Shapes: N items; L values of a list; V distinct values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.base.errors import DataError, RecspecError, SettingsError, unknown
from recspec.base.summaries import as_data
from recspec.data.encoding import Encoders
from recspec.data.storage import open_split, scalar
from recspec.evaluation.interactions import Rows, blocks
from recspec.evaluation.rankings import Ranked
from recspec.evaluation.report import Evaluation, Slice, standard_error
from recspec.evaluation.scoring import SplitScores
from recspec.evaluation.task import EvaluationTask
from recspec.evaluation.warnings import Probabilities
from recspec.feature_spec import FeatureSpec
from recspec.loading import item_features
from recspec.metrics import Ranking, Values, calibration_error
from recspec.metrics import measures as metrics
from recspec.models import Ids, Scores

MOST_ROWS_OF_ERRORS = 1 << 22  # rows of which values are kept for standard errors: 16 MB for each metric
HEAD_SHARE = 0.5
"""Share of the interactions that the head holds: the fewest most popular items that together reach it."""

Number = TypeVar("Number", np.int64, np.float64)
Owner = Literal["user", "item", "row"]

RANGES = 4
"""Ranges of about equally many entries into which a column of numbers is cut."""

MOST_VALUES = 20
"""Values that stay apart; the others, which are rarer, become one."""


def evaluate_rows(
    scores: Scores,
    labels: NDArray[np.bool_],
    *,
    groups: Ids | None = None,
    are_logits: bool = True,
    calibrated: Callable[[Scores], Scores] | None = None,
    have_own_labels: bool = True,
) -> Evaluation:
    """The evaluation of rows by their scores.

    Args:
        scores: (rows,) the model's scores.
        labels: (rows,) whether each row is positive.
        groups: (rows,) the group of each row, for GAUC.
        are_logits: Whether the scores are logits, so that their sigmoid is a probability.
        calibrated: Gives the calibrated logits, by which losses are then measured.
        have_own_labels: Whether the rate of positives is that of the data, by which probabilities are judged.
    """
    facts: dict[str, int] = {"rows": len(labels), "positives": int(labels.sum())}
    probabilities = None
    sample = sampled(len(labels))
    reached = {"auc": metrics.auc(scores, labels)}
    values = {"auc": metrics.auc_of_rows(scores[sample], labels[sample])}
    if are_logits:
        logits = scores if calibrated is None else calibrated(scores)
        found = calibration_error(logits, labels)
        reached["log_loss"] = metrics.log_loss(logits, labels)
        reached["accuracy"] = metrics.accuracy(logits, labels)
        reached["calibration_error"] = found.value
        values["log_loss"] = metrics.log_losses(logits[sample], labels[sample])
        values["accuracy"] = np.where(logits[sample] == 0, 0.5, (logits[sample] > 0) == labels[sample])
        if calibrated is not None:
            reached["log_loss_uncalibrated"] = metrics.log_loss(scores, labels)
            reached["calibration_error_uncalibrated"] = calibration_error(scores, labels).value
        if have_own_labels and 0 < facts["positives"] < facts["rows"]:
            constant, error = _against_the_rate(values["log_loss"], labels, labels[sample])
            probabilities = Probabilities(
                **facts,
                log_loss=reached["log_loss"],
                log_loss_of_constant=constant,
                standard_error=error,
                calibration=found,
                is_calibrated=calibrated is not None,
            )
    if groups is not None:
        ranking = metrics.rank_groups(scores, labels, groups)
        reached["group_auc"] = metrics.mean_area(ranking)
        values["group_auc"] = metrics.areas_of_groups(ranking)
        without = {"positive": ranking.num_left_out, "negative": ranking.num_groups - len(values["group_auc"])}
        facts |= {f"groups_without_{name}": count for name, count in without.items() if count}
    defined = {name: value for name, value in reached.items() if not np.isnan(value)}
    kept = {name: of.astype(np.float32) for name, of in values.items() if name in defined}
    return Evaluation(
        {"rows": defined},
        protocols={"rows": {**facts}},
        values={"rows": kept},
        positive=labels[sample],
        probabilities=probabilities,
    )


def evaluate_some(
    answers: SplitScores, chosen: NDArray[np.bool_] | slice, *, have_own_labels: bool = False
) -> Evaluation:
    """The evaluation of some of a split's rows."""
    rows = answers.task.rows
    return evaluate_rows(
        answers.of_rows()[chosen],
        rows.labels[chosen],
        groups=None if rows.groups is None else rows.groups[chosen],
        are_logits=answers.gives_logits,
        calibrated=answers.calibrated,
        have_own_labels=have_own_labels,
    )


def sampled(num_rows: int) -> slice:
    """The rows of which values are kept."""
    return slice(None, None, max(1, -(-num_rows // MOST_ROWS_OF_ERRORS)))


def _against_the_rate(losses: Values, labels: NDArray[np.bool_], sampled: NDArray[np.bool_]) -> tuple[float, float]:
    """Log loss of the best constant, the rate of these very labels, and the standard error of the difference to it."""
    rate = float(labels.mean())
    of_constant = np.where(sampled, -np.log(rate), -np.log1p(-rate))
    constant = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    differences = losses - of_constant
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else 0.0
    return float(constant), error


def slices_of_rows(answers: SplitScores) -> dict[str, dict[str, Slice]]:
    """The metrics of the rows of each slice: log loss, AUC and so on."""
    rows, found = answers.task.rows, dict[str, dict[str, Slice]]()
    for by, codes in _requested(answers.task):
        found[by] = {}
        for name, chosen in _parts(codes, _of_rows(codes, rows)):
            part = evaluate_some(answers, chosen)
            count, positive = int(chosen.sum()), int(rows.labels[chosen].sum())
            found[by][name] = Slice(count, positive, part.metrics["rows"], part.standard_errors["rows"])
    return found


def slices_of_ranking(
    task: EvaluationTask, protocol: str, ranked: Ranked, values_of: Callable[[Ranking], Mapping[str, Values]]
) -> dict[str, dict[str, Slice]]:
    """The metrics of the positives of each slice among their candidates."""
    found: dict[str, dict[str, Slice]] = {}
    for by, codes in _requested(task):
        found[by] = {}
        at = _rows_of(task, protocol, ranked.positives) if codes.owner == "row" else None
        of_positives = codes.codes[at] if at is not None else _of_rows(codes, ranked.positives)
        for name, chosen in _parts(codes, of_positives):
            ranking = ranked.part(chosen)
            values = {each: of for each, of in values_of(ranking).items() if len(of)}
            means = {each: float(of.mean()) for each, of in values.items()}
            errors = {each: standard_error(of) for each, of in values.items() if len(of) > 1}
            found[by][name] = Slice(ranking.num_groups, int(chosen.sum()), means, errors)
    return found


def _requested(task: EvaluationTask) -> Iterator[tuple[str, Codes]]:
    for by in task.settings.slices:
        if by in ("activity", "popularity") and task.lacks:
            raise SettingsError(f"slice '{by}': {task.lacks}")
        if by == "activity" and by not in task.spec.features:
            yield by, _activity(task)
        elif by == "popularity" and by not in task.spec.features:
            yield by, _popularity(task)
        else:
            yield by, codes_of(task, by)


def _activity(task: EvaluationTask) -> Codes:
    """Users by their number of known events before the split: none, and four ranges of about equally many users."""
    events = np.diff(task.seen.offsets).astype(np.float64)
    rows = task.rows
    assert rows.users is not None
    here = events[np.unique(rows.users)]
    codes, names = ranges(events, here[here > 0], "{:,.0f}".format)
    told = (f"{name} {'event' if name == '1' else 'events'}" for name in names)
    return Codes("user", np.where(events > 0, codes + 1, 0), ["new: 0", *told])


def _popularity(task: EvaluationTask) -> Codes:
    """Head items: the fewest most popular ones that hold half of the interactions; the tail; items without any."""
    counts = task.learned.counts
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    codes = np.ones(len(counts), dtype=np.int64)
    codes[order[before < HEAD_SHARE * counts.sum()]] = 0
    codes[counts == 0] = 2
    return Codes("item", codes, ["head", "tail", "not in training"])


def _of_rows(codes: Codes, rows: Rows) -> NDArray[np.int64]:
    """The code of each row."""
    if codes.owner == "row":
        return codes.codes
    ids = rows.users if codes.owner == "user" else rows.items
    if ids is None:
        raise SettingsError(f"slices by {codes.owner}s need the {codes.owner}s of the rows, which the split lacks")
    return codes.codes[ids]


def _rows_of(task: EvaluationTask, protocol: str, found: Rows) -> NDArray[np.int64]:
    """The split's row of each positive: the first of the same user and item."""
    rows = task.rows
    if protocol == "sampled" and task.lists_candidates:
        kept = ~(task.repeats | task.cold_rows)
        return np.flatnonzero(rows.labels & kept)
    assert rows.users is not None
    assert rows.items is not None
    assert found.users is not None
    assert found.items is not None
    at = np.flatnonzero(rows.labels)
    count = task.spec.num_ids(task.spec.item_id)
    keys, first = np.unique(rows.users[at].astype(np.int64) * count + rows.items[at], return_index=True)
    wanted = found.users.astype(np.int64) * count + found.items
    places: NDArray[np.int64] = at[first[np.searchsorted(keys, wanted)]]
    return places


def _parts(codes: Codes, of_rows: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Each value that occurs, with its rows."""
    for code, name in [*enumerate(codes.names), (-1, "missing")]:
        chosen = of_rows == code
        if chosen.any():
            yield name, chosen


# --- columns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """A column as codes: of every user or item by id, or of every row of the split."""

    owner: Owner
    codes: NDArray[np.int64]
    """-1 without a value."""
    names: Sequence[str]
    """(V,) the value of each code."""


def default_kind(spec: FeatureSpec) -> str | None:
    """The first categorical item feature beside the id."""
    own = spec.id_of("item")
    return next((name for name in spec.role("item") if name != own and spec.features[name].is_categorical), None)


def kinds_of_items(task: EvaluationTask, name: str) -> NDArray[np.integer]:
    """(N, L) ids of each item in a categorical feature or a catalogue column, 0 for none.

    Every value has its own id: rare ones that share one, as in slices, would be of one kind.
    """
    spec = task.spec
    if name in spec.role("item") and spec.features[name].is_categorical:
        found = item_features(spec, (*task.before, task.split), [name])
        ids = found[name].numpy() if found else np.zeros(spec.num_ids(spec.item_id), np.int64)
        if ids.ndim == 1:
            ids = ids[:, None] + (not spec.reserves_unknown(name))  # 0 is a value where no id means unknown
        return ids
    if (table := _catalogue(spec, "item", name)) is None:
        raise SettingsError(f"diversity: {unknown('item column', name, _columns(spec, 'item'))}")
    if pa.types.is_floating(table.type):
        table = pa.array(table.to_numpy(zero_copy_only=False), from_pandas=True)  # NaN is no value
    codes = table.dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _by_id(spec, "item", codes + 1, 0)[:, None]


PRICES = ("price_text", "price")
"""Names of the catalogue column of raw prices; the first one where the price is a feature too."""


def prices_of_items(spec: FeatureSpec) -> NDArray[np.float64] | None:
    """(N,) the price of each item, 0 where it is unknown or below 0; None if the catalogue has no column of prices."""
    for name in PRICES:
        column = None if name in spec.features else _catalogue(spec, "item", name)
        if column is not None and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            prices = np.nan_to_num(column.cast(pa.float64()).to_numpy(zero_copy_only=False), posinf=0.0)
            return _by_id(spec, "item", np.maximum(prices, 0.0), 0.0)
    return None


def codes_of(task: EvaluationTask, name: str) -> Codes:
    """A feature of users, items or rows, or a raw column of a catalogue, as codes.

    Raises:
        SettingsError: for an unknown name, or a column of lists.
    """
    spec = task.spec
    for owner in ("user", "item"):
        own = spec.id_of(owner)
        table = _catalogue(spec, owner, name) if own is not None else None
        if table is not None and not (name in spec.features and name not in spec.role(owner)):
            codes, names = _encoded(table) if name not in spec.features else _of_feature(spec, name, table.to_numpy())
            return Codes(owner, _by_id(spec, owner, codes, -1), names)
    if name not in spec.columns(task.split):
        if any(name in _columns(spec, owner) for owner in ("user", "item")):
            raise SettingsError(
                f"slice: '{name}' holds lists in the catalogue; slices are by a column of single values"
            )
        known = [*spec.columns(task.split), *_columns(spec, "user"), *_columns(spec, "item")]
        raise SettingsError(f"slice: {unknown('slice', name, ['activity', 'popularity', *dict.fromkeys(known)])}")
    if spec.features[name].is_list:
        raise SettingsError(f"slice: '{name}' holds a list in each row; slices are by a column of single values")
    reader = open_split(spec, task.split, [name])
    values = np.concatenate([np.zeros(0), *(scalar(block[name]) for _, block in blocks(reader))])
    return Codes("row", *_of_feature(spec, name, values))


def ranges(
    values: NDArray[Any], among: NDArray[Any], whole_number: Callable[[float], str] = as_data
) -> tuple[NDArray[np.int64], list[str]]:
    """The range of each value, of `RANGES` ranges with about equally many of the values `among`; their names."""
    among = among[np.isfinite(among)]
    cuts = np.unique(np.quantile(among, np.arange(1, RANGES) / RANGES)) if len(among) else np.zeros(0)
    codes = np.searchsorted(cuts, values, side="left")  # a cut ends its range
    whole = bool(len(among)) and bool((among == np.floor(among)).all())
    names = []
    for place in range(len(cuts) + 1):
        held = among[np.searchsorted(cuts, among, side="left") == place]
        if not len(held):
            names.append("none")
            continue
        low, high = float(held.min()), float(held.max())
        shown = [whole_number(each) if whole else f"{each:.4g}" for each in (low, high)]
        names.append(shown[0] if low == high else f"{shown[0]} to {shown[1]}")
    return np.where(np.isfinite(values), codes, -1), names


def _of_feature(spec: FeatureSpec, name: str, values: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    feature = spec.features[name]
    if not feature.is_categorical:
        return _numbers(values)
    distinct, codes = np.unique(values.astype(np.int64), return_inverse=True)
    raw, unknown_id = _raw_values(spec, name), 0 if spec.reserves_unknown(name) else -1

    def named(place: int) -> str:
        number = int(distinct[place])
        if number == unknown_id:
            return "unknown"
        known = raw is not None and 0 < number <= len(raw)
        return str(raw[number - 1].as_py()) if raw is not None and known else str(number)

    return _commonest(codes, len(distinct), named)


def _numbers(values: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    distinct, codes = np.unique(values, return_inverse=True)
    if len(distinct) <= MOST_VALUES and not np.isnan(distinct.astype(np.float64)).any():
        return codes, [as_data(each) for each in distinct.tolist()]
    return ranges(values.astype(np.float64), values.astype(np.float64))


def _raw_values(spec: FeatureSpec, name: str) -> pa.Array | None:
    """The raw values of a feature's ids from 1 on, where the dataset keeps its vocabulary."""
    if "encoders" not in spec.metadata:
        return None
    try:
        return Encoders.load(spec.folder).vocabulary_of(name).values
    except (RecspecError, KeyError):  # hashed values have none
        return None


def _commonest(
    codes: NDArray[np.int64], count: int, named: Callable[[int], str]
) -> tuple[NDArray[np.int64], list[str]]:
    """Codes of the most frequent of `count` values in their order, and one for all others; their names."""
    if count <= MOST_VALUES:
        return codes, [named(place) for place in range(count)]
    counts = np.bincount(codes[codes >= 0], minlength=count)
    kept = np.sort(np.argsort(-counts, kind="stable")[: MOST_VALUES - 1])
    new = np.full(count + 1, len(kept))
    new[kept], new[-1] = np.arange(len(kept)), -1  # a code of -1 reads the last place
    return new[codes], [*(named(int(each)) for each in kept), "others"]


def _catalogue(spec: FeatureSpec, owner: str, name: str) -> pa.Array | None:
    """A column of single values of a catalogue, one for each id after unknown; None without it."""
    if name not in _columns(spec, owner):
        return None
    file = spec.catalogue(owner)  # type: ignore[arg-type]
    try:
        column = pq.read_table(file, columns=[name], partitioning=None).column(0).combine_chunks()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{file}, column '{name}': damaged: {error}") from None
    return None if pa.types.is_nested(column.type) else column


def _columns(spec: FeatureSpec, owner: str) -> list[str]:
    file: Path | None = spec.catalogue(owner) if spec.id_of(owner) is not None else None  # type: ignore[arg-type]
    return list(pq.read_schema(file).names) if file is not None else []


def _encoded(column: pa.Array) -> tuple[NDArray[np.int64], list[str]]:
    """Codes of a raw column, -1 for missing values; numbers of many values in ranges."""
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _numbers(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    try:
        encoded = column.cast(pa.string()).dictionary_encode()
    except pa.ArrowException:
        raise SettingsError(f"a catalogue column of {column.type} has no values to measure by") from None
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return _commonest(codes, len(encoded.dictionary), lambda place: str(encoded.dictionary[place].as_py()))


def _by_id(spec: FeatureSpec, owner: str, of_rows: NDArray[Number], none: float) -> NDArray[Number]:
    """Values of a catalogue's rows by id; reserved ids and ids after the last row have `none`."""
    own = spec.id_of(owner)  # type: ignore[arg-type]
    assert own is not None
    found = np.full(spec.num_ids(own), none, dtype=of_rows.dtype)
    first = int(spec.reserves_unknown(own))
    rows = of_rows[: len(found) - first]
    found[first : first + len(rows)] = rows
    return found
