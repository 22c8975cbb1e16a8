"""How each command calls its verb, and what it prints of the result."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from recspec import __version__, api
from recspec.api import Place, Section, View, figures
from recspec.base.errors import SettingsError, how_many
from recspec.base.summaries import NOTES, as_data, shown_counts
from recspec.cli.console import err, out, print_json, print_next, print_remarks, print_view, step, tell
from recspec.cli.from_verbs import Call
from recspec.cli.process import end_by_force, fresh_folder, is_first
from recspec.cli.training_display import SearchDisplay, TrainingDisplay, print_next_of, print_result, show_trial

if TYPE_CHECKING:
    from recspec.inference import Recommendation, RecommendedItem

DRIFTED = 3
"""Exit status of `drift --fail` if anything has drifted."""


def _print_view_or_json(result: Any, json: bool) -> None:
    print_json(result.to_dict()) if json else print_view(result.view())


# --- data ------------------------------------------------------------------------------------------------------------


def prepare(call: Call) -> None:
    """Print what was counted, inferred and dropped."""
    from recspec.data.prepare import Remark

    with api.stages(None) as show:

        def progress(stage: str, done: float, total: float | None) -> None:
            if isinstance(stage, Remark):
                err.print(stage)
            else:
                show(stage, done, total)

        made = call(progress=progress)
    err.print(made.message)
    print_prepared(made)
    if (call["windows"] or 1) > 1:
        print_next("backtest", "ease", call["out"], fresh_folder(call["out"].parent, "backtest"))
    elif "valid" in made.splits:
        print_next("auto", call["out"], fresh_folder(call["out"].parent, "auto"), "--minutes", search_minutes(made))
    else:
        print_next("describe", call["out"])


def search_minutes(data: api.Data) -> int:
    """Minutes of a search that suit a dataset's number of events or rows."""
    rows = data.prepared["rows"]
    count = data.prepared.get("interactions", rows["train"] if isinstance(rows, Mapping) else 0)
    return next((minutes for most, minutes in ((50_000, 2), (1_000_000, 10)) if int(str(count)) <= most), 30)


def print_prepared(data: api.Data) -> None:
    """What a preparation counted, then what it inferred, dropped and changed, a line each."""
    print_view(View("", [figures("prepared", shown_counts(data.prepared, data.spec.metadata))]))
    for name in NOTES:
        if name in data.prepared:
            out.print(name, style="bold")
            sentences = data.prepared[name]
            for sentence in sentences if isinstance(sentences, list) else [sentences]:
                out.print(f"  - {sentence}", soft_wrap=True)


def check(call: Call) -> None:
    """Print the number of features and of rows."""
    spec = api.open_data(**call.values).spec
    rows = ", ".join(f"{split} {how_many(count, 'row')}" for split, count in call().items())
    out.print(f"ok: {how_many(len(spec.features), 'feature')}; {rows or 'no split'}")


def describe(call: Call, *, json: bool = False) -> None:
    """Print the page's path, JSON or tables."""
    if json and call["html"] is not None:
        raise SettingsError("describe: --html and --json are two outputs; give one of them")
    described = call()
    if described.page is not None:
        out.print(str(described.page), soft_wrap=True)
    elif json:
        print_json(described.to_dict())
    else:
        view = described.view()
        out.print(view.title, soft_wrap=True)
        print_view(view)


def write_dataset(call: Call) -> None:
    """Print where the splits of a new dataset are."""
    made = call()
    out.print(f"{made.path}: {', '.join(made.splits)} written as {call['to']}")


# --- training --------------------------------------------------------------------------------------------------------


def train(call: Call, *, verbose: bool = False, json: bool = False) -> None:
    """Print the plan, or what the training reached.

    Args:
        verbose: Show every automatic choice and its reason.
    """
    if call["plan"]:
        planned = call()
        if json and is_first():
            print_json(planned.to_dict())
        elif is_first():
            for name, choice in planned.items():
                out.print(f"{name}: {choice}", soft_wrap=True)
            for note in planned.notes:
                err.print(f"note: {note}")
        return
    if call["seeds"] is not None:
        table = call(tell=step if is_first() else None)
        if is_first():
            _print_view_or_json(table, json)
            print_next("compare", call["run"])
        return
    with TrainingDisplay(verbose=verbose) as display:
        trained = call(progress=display.show)
    if not is_first():
        return
    run = call["run"]
    if trained.result is None:
        step(f"{run / 'bundle'}: the bundle; {run / 'log.jsonl'}: the figures")
    else:
        print_result(trained.result)
    print_next_of(run, trained.data, call["data"])
    if json and trained.result is not None:
        print_json(trained.result.to_dict())


def compare(call: Call, *, json: bool = False) -> None:
    """Print means, deviations and tests; or the table in the format of a paper."""
    if json and call["format"] is not None:
        raise SettingsError("compare: --format and --json are two outputs; give one of them")
    table = call(tell=tell if is_first() else None)
    if not is_first():
        return
    if call["format"] is not None and call["out"] is None:
        out.print(table.to_text(call["format"]), end="", soft_wrap=True)
    else:
        _print_view_or_json(table, json)
    if call["out"] is not None:
        err.print(f"{call['out']}: written", soft_wrap=True)


def backtest(call: Call, *, json: bool = False) -> None:
    """Print each window as it ends, then the means over windows."""
    _print_view_or_json(call(progress=False, tell=step), json)


def tune(call: Call, *, json: bool = False) -> None:
    """Print the trials as they go, then the search."""
    search = call(progress=show_trial, tell=step)
    _print_view_or_json(search, json)
    if search.found.best is not None and not search.found.left:
        print_next_of(call["out"] / "best", search.data, call["data"])


def auto(call: Call, *, json: bool = False) -> None:
    """Print the leaderboard."""
    with SearchDisplay(call["minutes"]) as display:
        result = call(progress=display)
    _print_view_or_json(result, json)
    print_next_of(result.board.best, result.model.data, call["data"])


def update(call: Call, *, json: bool = False) -> None:
    """Print what is new, and how long it took."""
    if call["every"] is None:
        with TrainingDisplay() as display:
            updated = call(progress=display.show)
    else:
        updated = call(progress=False, tell=step)
    found = updated.found
    if updated.line and call["every"] is None:  # else each outcome was told when it came
        step(updated.line)
        for note in () if found is not None else updated.view().notes:
            err.print(f"note: {note}")
    if found is None or call["every"] is not None:
        if json:
            print_json(updated.to_dict())
        return
    if found.result is not None:
        print_result(found.result)
    counts, seconds = found.counts, found.seconds
    left = f"; left out: {how_many(counts['left_out'], 'row')}" if counts["left_out"] else ""
    err.print(", ".join(how_many(counts[f"{thing}s"], f"new {thing}") for thing in ("event", "user", "item")) + left)
    for note in found.notes if updated.outcome is None else updated.outcome.notes:
        err.print(f"note: {note}")
    err.print(
        f"{found.folder}: the new version, in {seconds['all']:.1f} s (data {seconds['data']:.1f}, model "
        f"{seconds['train']:.1f}); {found.bundle_bytes:,} bytes"
    )
    print_next("serve", call["run"])
    if json:
        print_json(updated.to_dict())


def blend(call: Call, *, json: bool = False) -> None:
    """Print the weights, and what the blend reached."""
    model = call()
    made = model.blended
    if json:
        print_json(made.to_dict())
        return
    notes = [f"wrote {made.bundle}"]
    if made.value is not None:
        gain = f"{made.value - max(made.alone):+.4f} against the best model alone"
        notes.insert(0, f"{call['metric']} on valid: {made.value:.4f}, {gain} ({made.users:,} users)")
    table = Section("", ("run", "model", "alone", "form", "weight"), [*made.lines()])
    print_view(View(f"blend of {len(call['runs'])} models", [table], notes))
    if call["data"] is not None:
        print_next_of(call["out"], model.data, call["data"])


def pipeline(call: Call, *, json: bool = False) -> None:
    """Print the retrievers."""
    made = call().built
    if json:
        print_json(made.to_dict())
        return
    title = f"{made.card.candidates:,} candidates, ranked by {made.model}"
    rows = [(each.name, each.model, each.items, each.search) for each in made.retrievers]
    kept = [] if made.card.filter is None else [f"the filter keeps {made.kept:,} of {made.items:,} items"]
    table = Section("", ("retriever", "model", "items", "search"), rows)
    print_view(View(title, [table], [*kept, f"wrote {made.bundle}"]))
    print_next("serve", call["out"])


# --- measured --------------------------------------------------------------------------------------------------------


def evaluate(call: Call, *, json: bool = False) -> None:
    """Print metrics beside the baselines."""
    result = call()
    if not is_first():
        return
    view = result.view()
    if json:
        print_json(result.to_dict())
    else:
        print_view(View(view.title, view.sections, view.notes, view.warnings))
    for file in result.files:
        err.print(f"{file}: kept", soft_wrap=True)
    print_remarks(view)
    print_next("report", call["run"])


def show(call: Call, *, json: bool = False) -> None:
    """Print the view of a result."""
    _print_view_or_json(call(), json)


def drift(call: Call, *, json: bool = False, fail: bool = False) -> None:
    """Print what has drifted.

    Args:
        fail: Exit with status 3 if anything has drifted.
    """
    result = call()
    _print_view_or_json(result, json)
    if result.file is not None:
        err.print(f"{result.file}: written", soft_wrap=True)
    if fail and result.flagged:
        raise SystemExit(DRIFTED)


def report(call: Call) -> None:
    """Print the path of the page."""
    made = call()
    if made.why_not_tracked is not None:
        tell(made.why_not_tracked)
    out.print(str(made.path), soft_wrap=True)


def experiment_report(call: Call, *, json: bool = False) -> None:
    """Print figures and the verdict."""
    result = call()
    _print_view_or_json(result, json)
    if result.page is not None:
        err.print(f"{result.page}: the page", soft_wrap=True)


def bench_train(call: Call, *, json: bool = False) -> None:
    """Print the figures, and where the time of a step goes."""
    measured = call()
    if not is_first():
        return
    if json:
        print_json(measured)
        return
    tables = measured.pop("profile", {})
    titles = {"parts": "parts of a step", "operations": "operations", "largest": "the largest"}
    sections = [_lines(title, tables[name]) for name, title in titles.items() if name in tables]
    print_view(View("", [figures(f"training {call['model']}", measured), *sections]))


def bench(call: Call, *, json: bool = False) -> None:
    """Print latencies of models, or of a server."""
    measured = call()
    title = f"{measured['model']} at {call['url']}" if call["url"] else "answering"
    print_json(measured) if json else print_view(View("", [_lines(title, measured["measured"])]))


def _lines(title: str, lines: Sequence[Mapping[str, object]]) -> Section:
    """A table of lines that hold the same figures."""
    return Section(title, tuple(lines[0]), [tuple(line.values()) for line in lines])


# --- answers ---------------------------------------------------------------------------------------------------------


def predict(call: Call) -> None:
    """Write CSV to standard output without a file."""
    call(out=call["out"] or "-", tell=err.print)


def recommend(
    call: Call,
    *,
    user: str | Sequence[str] | None = None,
    users: Place | None = None,
    context: str | Sequence[str] | None = None,
    json: bool = False,
) -> None:
    """Print the items of each user.

    Args:
        user: Raw user id; repeatable.
        users: File of raw user ids: one a line, or the users' column of a csv, jsonl or parquet file.
        context: Raw column of the request; repeatable.
        all: Recommend to every user; needs --out.
    """
    given, problems = _context(context or [])
    if call["items"] == []:
        problems.append("--items: holds no id")
    if call["all"] and call["out"] is None:
        problems.append("--all needs --out FILE.csv, .jsonl or .parquet, or --out FOLDER")
    if user and users:
        problems.append("--user and --users: give one of them")
    SettingsError.refuse("recommend", problems)
    asked = Call(call.verb, {**call.values, "users": user or users, "context": given})
    if call["out"] is not None:
        asked(tell=err.print)
        return
    answers = asked(kind="answers")
    if json:
        print_json([_with_columns(*each) for each in answers])
        return
    for answer, fields in answers:
        print_recommendation(answer, fields)


def similar(call: Call, *, json: bool = False) -> None:
    """Print the items like one."""
    found = call(kind="answers")
    if json:
        print_json(found.to_dict())
        return
    _print_items(f"like {found.item}{f': {found.title}' if found.title else ''}", found.items, found.notes)


def _context(texts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Columns and values of `COLUMN=VALUE`, and what is wrong with them."""
    found, problems = dict[str, str](), list[str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            problems.append(f"--context {text[:80]}: expected COLUMN=VALUE")
        elif name.strip() in found:
            problems.append(f"--context {name.strip()[:80]}: is given twice")
        found[name.strip()] = value
    return found, problems


def _with_columns(answer: Recommendation, fields: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """The answer as plain values; `columns` of an item are those of the catalogue that were asked for."""
    found: dict[str, Any] = answer.to_dict()
    for place, item in enumerate(found["items"] if fields else ()):
        item["columns"] = {name: values[place] for name, values in fields.items()}
    return found


def print_recommendation(answer: Recommendation, fields: Mapping[str, Sequence[object]]) -> None:
    """Print one user's items as a table, with columns of the catalogue."""
    is_popular = answer.answered_by == "popularity"
    if answer.user is None:
        who = "the most popular items" if is_popular else f"answered by the {answer.answered_by}".replace("_", "'s ")
    else:
        so = "" if answer.known else "unknown, so "
        who = f"user {answer.user}" + (f": {so}the most popular items" if is_popular else "")
    _print_items(who, answer.items, answer.notes, fields, whole=is_popular)


def _print_items(
    heading: str,
    items: Sequence[RecommendedItem],
    notes: Sequence[str],
    fields: Mapping[str, Sequence[object]] = MappingProxyType({}),
    *,
    whole: bool = False,
) -> None:
    """A table of items with their scores, whole numbers or logits, and with their reasons if there are any."""
    columns: dict[str, list[object]] = {"": [*range(1, len(items) + 1)], "item": [str(item.item) for item in items]}
    if any(item.title for item in items):
        columns["title"] = [item.title or "" for item in items]
    columns["score"] = [f"{item.score:.{0 if whole and item.boost is None else 4}f}" for item in items]
    columns |= {name: [as_data(value) for value in values] for name, values in fields.items()}
    if any(item.because for item in items):
        columns["because"] = [api.reasons(item.because) or "" for item in items]
    if any(item.retrieved_by is not None for item in items):
        columns["retrieved by"] = [", ".join(item.retrieved_by or ()) for item in items]
    rows = [*zip(*columns.values(), strict=True)]
    print_view(View("", [Section(heading, tuple(columns), rows)], [f"note: {note}" for note in notes]))


# --- models elsewhere ------------------------------------------------------------------------------------------------


def verify(call: Call) -> None:
    """Print the manifest's digest."""
    digest = call()
    out.print(f"{digest}  {digest.folder}")


def import_tf(call: Call) -> None:
    """Print what was imported."""
    print_view(call().view())


def export(call: Call, *, json: bool = False) -> None:
    """Print differences and latency, and the command that takes the export."""
    made = call(progress=lambda stage: err.print(f"{stage} ..."))
    sheet = made.description
    if json:
        print_json(sheet)
        for note in made.notes:
            tell(note)
    else:
        print_view(made.view())
    if triton := sheet.get("triton"):
        names = (triton.get("recommend", ""), triton["raw"] or "", triton["model"])
        model = next(name for name in names if name and not name.startswith("none: "))
        options = (f"--model-repository={call['out']}", "--model-control-mode=explicit", f"--load-model={model}")
        print_next(*options, program="tritonserver")
    elif sheet["signature"]["form"] == "ranker":  # which `recspec serve` doesn't take
        print_next("bench", "infer", call["run"], call["out"], "--form", "ranker")
    else:
        print_next("serve", call["out"])


def serve(call: Call, *, json: bool = False) -> None:
    """Print the addresses once the server answers."""
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=line)
    logging.getLogger("recspec").setLevel(logging.INFO)  # which version answers

    def ready(serving: api.Serving) -> None:
        if json:
            print_json({"http": serving.url, "grpc": serving.grpc, "models": list(serving.models)})
            sys.stdout.flush()
        grpc_too = f", gRPC at {serving.grpc}" if serving.grpc else ""
        err.print(f"{', '.join(serving.models)} at {serving.url} (a page to try it; /docs: routes){grpc_too}")

    call(block=True, ready=ready, force=end_by_force)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. Threads of gRPC and torch sometimes abort an interpreter that ends the usual way.
    os._exit(0)


# --- lists ---------------------------------------------------------------------------------------------


def models(call: Call, *, json: bool = False) -> None:
    """Print a line for each model, or everything about one."""
    _print_view_or_json(call(), json)


def datasets(call: Call, *, json: bool = False) -> None:
    """Print every dataset with its settings."""
    listing = call()
    if json:
        print_json(listing.to_dict())
        return
    for name in listing:
        out.print(f"[bold]{name}[/bold]  {listing.about[name]}", markup=True)
        print_view(listing.settings(name))


def print_schema(*, columns: bool = False) -> None:
    """Print the JSON Schema of a specification file, for editors.

    Args:
        columns: Print the schema of a columns file instead.
    """
    if columns:
        from recspec.data.prepare import columns_schema

        print_json(columns_schema())
    else:
        from recspec.feature_spec import json_schema

        print_json(json_schema())


def print_version() -> None:
    """Print the version of recspec."""
    out.print(__version__)


def do(call: Call) -> None:
    """Call what prints by itself."""
    call()
