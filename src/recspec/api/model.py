"""A trained model, opened: a run, a bundle, a blend or a pipeline."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from recspec.api.data import Data, opened
from recspec.api.evaluating import EvaluationResult, evaluate
from recspec.api.exporting import Exported, export
from recspec.api.frames import Kind, answered, as_ids, chosen_kind, from_table, is_frame, kind_of, table_of, to_table
from recspec.api.listing import Report, report
from recspec.api.progress import Stages, stages
from recspec.api.serving import Serving, serve
from recspec.api.updating import Update, update
from recspec.api.verb_checks import Place, as_verb, signed, verb
from recspec.api.views import Section, View, Viewed, figures
from recspec.base.errors import DataError, SettingsError, how_many, require_extra

if TYPE_CHECKING:
    import pyarrow as pa

    from recspec.inference import Counts, How, Predictor, ReadLive, Recommendation, RecommendRequest
    from recspec.training import Result


MOST_IMPORTANT = 20
"""Columns whose importance is shown."""


class Note(UserWarning):
    """A remark on an answer: unknown values, a short list, scores that are no probabilities."""


class Model(Viewed):
    """A trained model that takes raw values. `os.fspath(model)` is its folder.

    One class because its methods are the verbs that people look for on a model.

    Attributes:
        path: The folder of the run or bundle.
        kind: The kind of frame in which answers go out, unless the question is a frame itself.
        result: What training reached, right after a training.
    """

    def __init__(
        self,
        path: Place,
        *,
        device: str = "auto",
        verify: bool = True,
        kind: Kind = "pyarrow",
        data: Data | None = None,
        result: Result | None = None,
    ) -> None:
        self.path, self._device, self._verify = Path(path), device, verify
        self.kind, self._data, self.result = kind, data, result

    def __fspath__(self) -> str:
        return str(self.path)

    @cached_property
    def predictor(self) -> Predictor:
        """The bundle with its encoders and catalogues, opened when it is first needed."""
        from recspec.inference import Predictor

        return Predictor.open(self.path, device=self._device, verify=self._verify)

    @property
    def name(self) -> str:
        """The model's name, such as sasrec."""
        return self.predictor.bundle.card.model

    @property
    def data(self) -> Data | None:
        """The dataset that it was trained on, where its run says that it lies; None if it does not say.

        Raises:
            SpecError: if it is no longer there.
        """
        if self._data is None:
            from recspec.bundle import run_record

            record = run_record.read(run_record.home(self.predictor.bundle.folder))
            if record is not None and record.data is not None:
                self._data = Data(opened(record.data.path).spec, kind=self.kind)
        return self._data

    @property
    def plan(self) -> Plan:
        """Every choice of the training and its reason, as its log holds them; empty for a bundle without a log."""
        return Plan.of_log(self.path, self.name)

    # --- answers ------------------------------------------------------------------------------------------------------

    @verb
    def predict(
        self,
        rows: object,
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        explain: bool = False,
        out: Place | None = None,
        workers: int = 1,
        engine: Literal["local", "spark", "ray"] = "local",
        shard_size: int | None = None,
        allow_outside: bool = False,
        kind: str | None = None,
        progress: bool | Stages | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Any:
        """Add a column `probability` to raw rows or a prepared split.

        If the model only ranks, the column is `score`.

        Args:
            rows: Raw rows (csv, jsonl or parquet; in Python also a data frame), or a prepared dataset.
            split: Split of a prepared dataset; by default test.
            columns: Columns to keep before the added one; by default all of raw rows, or ids and label of a split.
            explain: Add what each column contributes to the log-odds of the probability (lightgbm and
                logistic_regression): `log_odds`, `base`, `contribution_COLUMN` and, in words, `because`.
            out: File (csv, jsonl or parquet) or folder of shards; by default standard output; in Python, that is -
                and the default a frame. CSV has the separator and the decimal mark of a CSV file of rows.
            workers: Processes that write shards.
            engine: Engine of these processes: local, spark or ray.
            shard_size: Users or rows of a shard; by default 16,384.
            allow_outside: Allow files outside the specification's folder.
            kind: Kind of frame; by default that of `rows`.
            progress: A function that receives stages (stage, done, total), or False for no bar.
            tell: A function that receives a sentence on what was written.

        Returns:
            A frame of B rows for B raw rows, in their order; the probability is that of the label, from 0 to 1. One of
            the kind of `rows` holds their own columns, and in pandas their index. With `out`, the path.

        Raises:
            DataError: naming every column that is missing, and every value that can't be read.
            RequestError: with `explain`, for a model whose rows can't be explained.
            SpecError: for an unknown split, or another dataset than the model was trained on.
        """
        from recspec.inference import (
            marks_of,
            note_of_scores,
            predict_shards,
            predict_split,
            predict_tables,
            row_writer,
        )

        kept = list(columns) if columns is not None else None
        if is_frame(rows):
            asked, place = chosen_kind(kind, kind_of(rows)), Path("rows")
        else:
            asked, place = chosen_kind(kind, self.kind), _path_of(rows)
        is_prepared = not is_frame(rows) and (place.is_dir() or place.suffix in (".yaml", ".yml"))
        if split is not None and not is_prepared:
            raise SettingsError(f"predict: {place} holds raw rows, which have no split; leave split={split!r} out")
        spec = opened(cast(Place, rows), allow_outside=allow_outside).spec if is_prepared else None
        how = _shards("predict", out, workers, engine, shard_size)
        if out is not None and how is not None:
            if is_frame(rows):
                raise SettingsError(
                    f"out {out}: a folder of shards is made of a Parquet file or a prepared dataset; "
                    "expected one of these as rows, or the name of a file to write"
                )
            with _told_when_written(tell, out, "row") as written, stages(progress) as show:
                written.append(
                    predict_shards(
                        self.predictor,
                        spec or place,
                        Path(out),
                        how,
                        split=split or "test",
                        columns=kept,
                        explain=explain,
                        allow_outside=allow_outside,
                        progress=show,
                        note=_warn_one,
                    )
                )
            return Path(out)
        tables: list[pa.Table] = []
        write_to = tables.append if out is None else None if out == "-" else Path(out)
        with stages(False if out == "-" and spec is None else progress) as show:
            if spec is not None:
                counts = predict_split(
                    self.predictor, spec, split or "test", write_to, columns=kept, explain=explain, progress=show
                )
            else:
                blocks = _blocks(to_table(rows, "rows")) if is_frame(rows) else _rows_of(place)
                with row_writer(write_to, like=None if is_frame(rows) else marks_of(self.predictor, place)) as write:
                    counts = predict_tables(self.predictor, blocks, write, columns=kept, explain=explain, where=place)
        nothing = f"{place} holds no row" if not counts.rows and not is_frame(rows) else None
        _warn([*counts.notes(), *filter(None, [nothing, note_of_scores(self.predictor)])])
        if out is not None:
            if tell is not None and out != "-":
                tell(f"{out}: {how_many(counts.rows, 'row')}")
            return Path(out)
        found = _joined(tables)
        return answered(rows, found, asked, kept) if is_frame(rows) else from_table(found, asked)

    @verb
    def recommend(
        self,
        users: object = None,
        *,
        items: object = None,
        context: Mapping[str, object] | None = None,
        k: int = 10,
        filter: str | None = None,
        exclude: object = None,
        include_seen: bool = False,
        diversity: float = 0.0,
        diverse_by: str | None = None,
        boost: str | Sequence[str] | None = None,
        at_most: str | None = None,
        explain: bool = False,
        journal: str | None = None,
        columns: Sequence[str] | None = None,
        all: bool = False,
        out: Place | None = None,
        workers: int = 1,
        engine: Literal["local", "spark", "ray"] = "local",
        shard_size: int | None = None,
        kind: str | None = None,
        progress: bool | Stages | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> Any:
        """Recommend k items to users, baskets or contexts.

        Items that a user acted on before are left out. Only the order of a user's scores has a meaning.

        Args:
            users: Raw ids of users: one, a list, a column of a frame, or the `Path` of a file: one a line, or the
                users' column of a csv, jsonl or parquet file.
            items: Basket of raw item ids, oldest first, instead of a user's history.
            context: Raw columns of the request, for models that read them.
            k: Number of items.
            filter: Condition on items, such as 'in_stock and price < 50'.
            exclude: Raw ids of items to leave out.
            include_seen: Include items that the user acted on before.
            diversity: Weight of variety, from 0 to 1.
            diverse_by: Item column that measures likeness; by default the model's item vectors.
            boost: Weight added to the scores of some items, such as 'is_new: 1.5'; 1 is a spread of scores.
            at_most: Largest number of items with one value of a column, such as 'category:2'.
            explain: Name the events of the history that explain each item.
            journal: Journal of users' newer events: sqlite:///FILE or postgresql+psycopg://USER@HOST/DATABASE.
            columns: Columns of the item catalogue to show.
            all: Recommend to every user of the dataset.
            out: File that ends in .csv, .jsonl or .parquet, or folder of shards, which a second call goes on with.
            workers: Processes that write shards.
            engine: Engine of these processes: local, spark or ray.
            shard_size: Users or rows of a shard; by default 16,384.
            kind: Kind of frame; by default that of `users`, or of the data that were prepared; `answers` gives a list
                of objects with notes and reasons instead, each with the columns of its items.
            progress: A function that receives stages (stage, done, total), or False for no bar.
            tell: A function that receives a sentence on what was written.

        Returns:
            A frame of one row a user and item, best first: `user`, `known` (False for an unknown user, who is answered
            by their events of the journal, or gets the most popular items), `rank` from 1, `item`, `title`, `score`,
            and where there are any `boost`, `because` and `retrieved_by`. Without titles in the catalogue, no `title`.
            With `out`, the path. Only the order of a user's scores has a meaning: they are no probabilities. For an
            unknown user who gets the most popular items, `score` is a number of users.

        Raises:
            RequestError: with every problem of the request.
            SettingsError: if nobody is named, or `out` has another ending.
            DataError: if there is no such journal, or if the model knows none of the users of a file to write.
        """
        from recspec.inference import (
            RecommendRequest,
            note_of_unknown_users,
            read_users,
            recommend_shards,
            recommend_to_file,
        )

        file = users if isinstance(users, Path) else None
        in_shards = out is not None and not Path(out).suffix
        read = read_users(self.predictor, file, _warn_one) if file and not in_shards else ()
        named = as_ids(users if file is None else read, "users")
        wanted = RecommendRequest(
            users=named,
            items=as_ids(items, "items"),
            context=dict(context or {}),
            k=k,
            filter=filter,
            exclude=as_ids(exclude, "exclude"),
            include_seen=include_seen,
            diversity=diversity,
            diverse_by=diverse_by,
            boosts=(boost,) if isinstance(boost, str) else tuple(boost or ()),
            at_most=at_most,
            explain=explain,
        )
        problems = []
        if all and (named or file):
            problems.append("users: all recommends to every user; leave users out")
        if not (all or users is not None or wanted.is_anonymous):
            problems.append("name users, take all, or give items or a context")
        if out is not None and Path(out).suffix not in ("", ".csv", ".jsonl", ".parquet"):
            problems.append(
                f"out {out}: expected a name that ends in .csv, .jsonl or .parquet, or without an ending for a folder "
                "of shards"
            )
        if file and in_shards and file.suffix in (".csv", ".jsonl", ".parquet"):
            problems.append(f"users {file}: a folder of shards reads text files with one id a line, such as users.txt")
        if in_shards and not (all or file):
            problems.append("users: a folder of shards is for all users, or for a file of users")
        if in_shards and columns:
            problems.append("columns: go with a frame or one file; join them to shards by item")
        if (out is not None or all) and explain:
            problems.append("explain: goes with named users and without out")
        if out is not None and not (all or named or file):
            problems.append("out: names users; without a user, leave it out")
        if journal is not None and (in_shards or wanted.is_anonymous):
            problems.append("journal: goes with users, in a frame or in one file")
        SettingsError.refuse("recommend", problems)
        how = _shards("recommend", out, workers, engine, shard_size)
        with _reading(journal, self.predictor) as live:
            if out is not None:
                with _told_when_written(tell, out, "user") as written, stages(progress) as show:
                    if how is not None:
                        counts = recommend_shards(
                            self.predictor, file, Path(out), wanted, how, progress=show, note=_warn_one
                        )
                        count, unknown = counts.count, counts.unknown
                        written.append(counts)
                    else:
                        chosen = None if all else named
                        shown = [columns] if isinstance(columns, str) else columns or ()
                        count, unknown = recommend_to_file(
                            self.predictor, chosen, Path(out), wanted, columns=shown, live=live, progress=show
                        )
                        written.append(count)
                if unknown:
                    answered_by = self.predictor.recommender.fallback_for_unknown_users(wanted)
                    _warn_one(f"{count:,} users: {note_of_unknown_users(unknown, answered_by)}")
                return Path(out)
            is_asked = kind_of(users) if is_frame(users) and not isinstance(users, Sequence) else self.kind
            if all:
                with stages(progress) as show:
                    found = _of_all(self.predictor, wanted, live, show)
                return from_table(_with(columns, self.predictor, found), chosen_kind(kind, is_asked))
            answers = self.predictor.recommend(wanted, live=None if live is None else live(named))
        if kind == "answers":
            return [(each, self._columns_of(each, columns or ())) for each in answers]
        _warn(_of_users(answers))
        found = _of_answers(self.predictor, answers, wanted)
        return from_table(_with(columns, self.predictor, found), chosen_kind(kind, is_asked))

    def _columns_of(self, answer: Recommendation, names: Sequence[str]) -> dict[str, list[object]]:
        """Columns of the catalogue for the items of an answer."""
        from recspec.inference import catalogue_columns

        found = catalogue_columns(self.predictor, names, [item.item for item in answer.items])
        return {name: each.to_pylist() for name, each in found.items()}

    @verb
    def similar(
        self,
        item: str | int,
        *,
        k: int = 10,
        filter: str | None = None,
        exclude: object = None,
        kind: str | None = None,
    ) -> Any:
        """Find the items most similar to one item.

        The model's vectors of items tell how similar they are, or its weights between items.

        Args:
            item: Raw id of the item.
            k: Number of items.
            filter: Condition on items, such as 'in_stock and price < 50'.
            exclude: Raw ids of items to leave out.
            kind: Kind of frame; by default that of the data that were prepared; `answers` gives an object instead.

        Returns:
            A frame of one row an item: `rank` from 1, `item`, `score` (a cosine, or the model's score), and
            `title` if the catalogue has titles.

        Raises:
            RequestError: with every problem of the request.
        """
        import pyarrow as pa

        found = self.predictor.similar(item, k=k, filter=filter, exclude=as_ids(exclude, "exclude"))
        if kind == "answers":
            return found
        _warn(found.notes)
        kinds = {"rank": pa.int32(), "item": _item_kind(self.predictor), "title": pa.string(), "score": pa.float64()}
        rows = [(rank, each.item, each.title, each.score) for rank, each in enumerate(found.items, start=1)]
        table = table_of(kinds, rows)
        return from_table(_titled(self.predictor, table), chosen_kind(kind, self.kind))

    @verb
    def explain(self, user: str | int, item: str | int, *, kind: str | None = None) -> Any:
        """The events of a user's history that speak for an item, strongest first.

        `predict(rows, explain=True)` explains probabilities of rows.

        Returns:
            A frame of one row an event: `item`, `title`, `value` and `by`. By `shares`, the values are parts of the
            model's score, and a last row holds the rest; by `nearest`, they are cosines of the model's vectors of
            items, which are no proof of what the model read. The frame is empty if nothing explains the score.

        Raises:
            RequestError: for an unknown user or item, or a model that reads a context.
        """
        import pyarrow as pa

        from recspec.inference import explain

        _, because = explain(self.predictor, user, item)
        rows: list[tuple[object, ...]] = []
        if because is not None:
            rows = [(each.item, each.title, each.value, because.kind) for each in because.events]
            rows += [] if because.rest is None else [(None, "(rest)", because.rest, because.kind)]
        kinds = {"item": _item_kind(self.predictor), "title": pa.string(), "value": pa.float64(), "by": pa.string()}
        table = table_of(kinds, rows)
        return from_table(table, chosen_kind(kind, self.kind))

    @verb
    def history(self, user: str | int, *, kind: str | None = None) -> Any:
        """The items of a user's events that the model knows: a frame of `item` and `title`.

        Oldest first where the model keeps the order of events, otherwise in order of the items' ids.

        Raises:
            RequestError: for an unknown user.
        """
        from recspec.inference import history_of

        table = _titled(self.predictor, history_of(self.predictor, user))
        return from_table(table, chosen_kind(kind, self.kind))

    # --- measured, exported, served -----------------------------------------------------------------------------------

    @as_verb(evaluate)
    def evaluate(self, data: Place | None = None, split: str = "test", **named: Any) -> EvaluationResult:
        """Measure the model on a dataset, by default the one that it was trained on; see `evaluate`."""
        named = {"device": self._device, "verify": self._verify, **named}
        if data is None and named.get("journal") is not None:
            return evaluate(self, None, split, **named)
        used = self.data if data is None else data
        if used is None:
            raise SettingsError(f"{self.path}: does not say which data trained it; pass them, as in evaluate('data')")
        return evaluate(self, used, split, **named)

    @as_verb(update)
    def update(self, new_events: object | None = None, **named: Any) -> Update:
        """Take new events, users and items into the model, which answers by the new version then; see `update`."""
        made = update(self, new_events, **named)
        self.__dict__.pop("predictor", None)
        if made.found is not None:
            self.path = made.found.folder.parent.parent  # another copy, if the run lies in a store
            self._data, self.result = None, made.found.result
        return made

    @as_verb(export)
    def export(self, out: Place, **named: Any) -> Exported:
        """Export the model, by default to ONNX, and check it against the bundle; see `export`."""
        return export(self, out, **named)

    @as_verb(serve)
    def serve(self, **named: Any) -> Serving:
        """Serve the model over HTTP and gRPC, beside other work of this process; see `serve`."""
        return serve(self, **named)

    def report(self, out: Place | None = None, *, data: Place | None = None) -> Report:
        """Write the report of the run as one HTML file that needs no network; see `report`."""
        return report(self, out=out, data=data if data is not None else self._data)

    def view(self) -> View:
        """How it was trained, what it reached on valid, and its settings."""
        card = self.predictor.bundle.card
        names = [name for name in ("epoch", "steps", "seconds", "stopped", "size") if card.trained.get(name)]
        told: dict[str, object] = {name: card.trained[name] for name in names}
        sections = [figures("trained", told)] if told else []
        for protocol, metrics in card.metrics.items():
            rows = [(name, f"{value:.4f}") for name, value in metrics.items()]
            sections.append(Section(f"valid, {protocol}", ("", ""), rows))
        if isinstance(importance := card.trained.get("importance"), Mapping):
            shares = [(name, f"{share:.1%}") for name, share in importance.items() if isinstance(share, float)]
            sections.append(Section("importance", ("", ""), shares[:MOST_IMPORTANT]))
        given = {name: value for name, value in card.settings.items() if value is not None}
        sections.append(figures("settings", given))
        warned = [str(each.get("message")) for each in card.warnings]
        return View(f"Model: {card.model} in {self.path}", sections, warned)


class Plan(Viewed, Mapping[str, str]):
    """The choices of a training by name, each with its value and its reason.

    Attributes:
        details: The whole plan as plain values.
        notes: What is allowed, but perhaps not meant.
    """

    def __init__(
        self, title: str, choices: Mapping[str, str], details: Mapping[str, object], notes: Sequence[str] = ()
    ) -> None:
        self._title, self._choices, self.details, self.notes = title, dict(choices), details, tuple(notes)

    @classmethod
    def of_log(cls, run: Path, model: str) -> Plan:
        """The plan that the log of a run began with, the last time that it began."""
        from recspec.base.files import LINE_BYTES, LineError, bounded_lines, parse_json

        place = next((each for each in (run, run.parent) if (each / "log.jsonl").is_file()), None)
        details: dict[str, object] = {}
        if place is not None:
            with (place / "log.jsonl").open("rb") as lines, suppress(LineError):
                for line in (each for each in bounded_lines(lines, LINE_BYTES) if b'"start"' in each[:40]):
                    with suppress(ValueError):  # a line that was cut off
                        found = parse_json(line.decode("utf-8"))
                        details = found if isinstance(found, dict) else {}
        choices = details.get("choices")
        texts = {str(name): str(text) for name, text in choices.items()} if isinstance(choices, dict) else {}
        return cls(f"plan of {model} in {run}", texts, details)

    def __getitem__(self, name: str) -> str:
        return self._choices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def to_dict(self) -> dict[str, object]:
        """The whole plan as plain values."""
        return dict(self.details)

    def view(self) -> View:
        """A line for each choice."""
        return View(self._title, [Section("", ("choice", "value: reason"), list(self._choices.items()))], self.notes)


@verb
def open(run: Place, *, device: str = "auto", verify: bool = True, kind: str | None = None) -> Model:
    """Open a run, a bundle, a blend or a pipeline.

    Args:
        run: Folder of a run or a bundle.
        device: Device: auto, cpu, cuda or cuda:N.
        verify: Compare files with their manifest.
        kind: Kind of frame in which answers go out; by default pyarrow.

    Raises:
        BundleError: if there is none, or it is damaged.
    """
    model = Model(run, device=device, verify=verify, kind=chosen_kind(kind))
    _ = model.predictor
    return model


# --- the answers as functions ----------------------------------------------------------------------------------------


RUN = "    run: Folder of a run or a bundle.\n"
OPENED = "\n    device: Device: auto, cpu, cuda or cuda:N.\n    verify: Compare files with their manifest."


def _of_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model as a function of a run, which also takes how the run is opened."""

    def function(run: Place, *given: Any, device: str = "auto", verify: bool = True, **named: Any) -> Any:
        if isinstance(run, Model) and (device, verify) == ("auto", True):
            return method(run, *given, **named)
        kind = run.kind if isinstance(run, Model) else "pyarrow"
        return method(Model(run, device=device, verify=verify, kind=kind), *given, **named)

    own = inspect.signature(function).parameters
    _, *others = inspect.signature(method).parameters.values()
    about, title, rest = (inspect.getdoc(method) or "").partition("Args:\n")
    described, returns, after = rest.partition("\n\nReturns:")
    function.__name__ = function.__qualname__ = method.__name__
    function.__doc__ = f"{about}{title}{RUN}{described}{OPENED}{returns}{after}"
    return verb(signed(function, [own["run"], *others, own["device"], own["verify"]]))


predict = _of_run(Model.predict)
recommend = _of_run(Model.recommend)
similar = _of_run(Model.similar)


# --- tables ----------------------------------------------------------------------------------------------------------


def _path_of(rows: object) -> Path:
    from recspec.base.files import local

    if isinstance(rows, (str, os.PathLike)):
        return local(os.fspath(rows), "predict: rows")
    raise DataError(f"predict: found {type(rows).__name__}; expected a data frame of raw rows, or the path of a file")


def _rows_of(place: Path) -> Iterator[pa.Table]:
    from recspec.inference import read_rows

    return read_rows(place)


def _blocks(table: pa.Table) -> Iterator[pa.Table]:
    from recspec.inference import ROWS

    return (table.slice(start, ROWS) for start in range(0, max(1, table.num_rows), ROWS))


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


@contextmanager
def _reading(journal: str | None, predictor: Predictor) -> Iterator[ReadLive | None]:
    """Reads the events of a journal that the model's dataset lacks; None without a journal."""
    if journal is None:
        yield None
        return
    require_extra("sqlalchemy", "loop")
    from recspec.loop import Histories, Journal

    with Journal(journal, read_only=True) as opened:
        yield Histories(opened, predictor).of


def _of_all(
    predictor: Predictor,
    wanted: RecommendRequest,
    live: ReadLive | None,
    show: Callable[[str, float, float | None], None],
) -> pa.Table:
    from recspec.inference import recommended

    schema, blocks = recommended(predictor, None, wanted, live=live)
    tables, done = [schema.empty_table()], 0
    for block in blocks:
        tables.append(block.table)
        done += block.users
        show("recommend", done, block.of)
    return _titled(predictor, _joined(tables))


def _of_answers(predictor: Predictor, answers: Iterable[Recommendation], wanted: RecommendRequest) -> pa.Table:
    """One row a user and item."""
    import pyarrow as pa

    rows = [(answer, rank, item) for answer in answers for rank, item in enumerate(answer.items, start=1)]
    users = [answer.user for answer, _, _ in rows]
    texts = {type(user) for user in users} - {type(None)} != {int}
    ids = (
        pa.array([None if user is None else str(user) for user in users], pa.string())
        if texts
        else pa.array(users, pa.int64())
    )
    columns = {
        "user": ids,
        "known": pa.array([answer.known for answer, _, _ in rows], pa.bool_()),
        "rank": pa.array([rank for _, rank, _ in rows], pa.int32()),
        "item": pa.array([item.item for _, _, item in rows], _item_kind(predictor)),
        "title": pa.array([item.title for _, _, item in rows], pa.string()),
        "score": pa.array([item.score for _, _, item in rows], pa.float32()),
    }
    if wanted.boosts:
        columns["boost"] = pa.array([item.boost for _, _, item in rows], pa.float32())
    if wanted.explain:
        columns["because"] = pa.array([reasons(item.because) for _, _, item in rows], pa.string())
    if predictor.pipeline is not None:
        columns["retrieved_by"] = pa.array(
            [list(item.retrieved_by or ()) for _, _, item in rows], pa.list_(pa.string())
        )
    return _titled(predictor, pa.table(columns))


def _with(columns: Sequence[str] | None, predictor: Predictor, table: pa.Table) -> pa.Table:
    """The table with columns of the catalogue; one that the table has already is not added again."""
    from recspec.inference import catalogue_columns

    names = [columns] if isinstance(columns, str) else list(columns or ())
    found = catalogue_columns(
        predictor, [name for name in names if name not in table.column_names], table.column("item").to_pylist()
    )
    for name, values in found.items():
        table = table.append_column(name, values)
    return table


def _titled(predictor: Any, table: Any) -> Any:
    """The table; without its titles if the items have none."""
    return table if predictor.items.titles is not None else table.drop_columns(["title"])


def reasons(explanation: Any) -> str | None:
    """The events or features that spoke for an item: their shares of the score, or their cosines to it."""
    if explanation is None:
        return None
    sign = "" if explanation.kind == "nearest" else "+"
    return "; ".join(f"{each.title or each.item} {each.value:{sign}.3f}" for each in explanation.events)


def _item_kind(predictor: Predictor) -> Any:
    """The Arrow type of raw item ids."""
    import numpy as np

    return predictor.raw_ids("item", np.zeros(0, np.int64)).type


def _shards(verb: str, out: Place | None, workers: int, engine: str, shard_size: int | None) -> How | None:
    """How a job is divided into shards; None without a folder for them. Refuses options that only go with a folder."""
    from recspec.inference import SHARD_SIZE, How

    if out is not None and out != "-" and not Path(out).suffix:
        return How(engine, workers, shard_size or SHARD_SIZE)  # type: ignore[arg-type]  # checked when the job begins
    given = {"workers": workers != 1, "engine": engine != "local", "shard_size": shard_size is not None}
    problems = [f"{name}: goes with out FOLDER, a name without an ending" for name, there in given.items() if there]
    SettingsError.refuse(verb, problems)
    return None


@contextmanager
def _told_when_written(tell: Callable[[str], None] | None, out: Place, what: str) -> Iterator[list[Counts | int]]:
    """Tell what a job wrote, which the block appends to a list: the counts of shards, or the number in one file."""
    started, written = time.perf_counter(), list[Any]()
    yield written
    seconds = time.perf_counter() - started
    (counts,) = written
    if tell is None:
        return
    if isinstance(counts, int):
        tell(f"{out}: {how_many(counts, what)}, {counts / seconds:,.0f} {what}s/s")
    else:
        took = "" if counts.kept == counts.shards else f", {seconds:,.0f} s"
        tell(f"{out}: {how_many(counts.count, what)} in {how_many(counts.shards, 'shard')}{took}")


def _of_users(answers: Iterable[Recommendation]) -> list[str]:
    """The notes on answers, each once, with its user; of several users with one note, the first and their number."""
    users: dict[str, dict[str | int, None]] = {}
    for answer in answers:
        for note in answer.notes:
            users.setdefault(note, {}).update({} if answer.user is None else {answer.user: None})
    told = {
        note: (
            f"user {next(iter(named))}: "
            if len(named) == 1
            else f"{len(named):,} users, such as {next(iter(named))}: "
            if named
            else ""
        )
        for note, named in users.items()
    }
    return [f"{who}{note}" for note, who in told.items()]


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        warnings.warn(note, Note, stacklevel=4)


def _warn_one(note: str) -> None:
    _warn([note])
