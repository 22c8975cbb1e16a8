"""Commands that ask a trained model: evaluate, predict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from typer import Argument, Option

from recspec.base.errors import SettingsError, how_many
from recspec.base.machine import keep_freed_memory
from recspec.cli.console import (
    Data,
    Device,
    Engine,
    Json,
    Outside,
    Run,
    ShardSize,
    Verify,
    Workers,
    err,
    how_of,
    out,
    print_counts,
    print_json,
    print_next,
    shard_problems,
    stages,
    tell,
    titled_table,
)
from recspec.cli.process import is_first

if TYPE_CHECKING:
    from recspec.evaluation import Report, Slice


PROTOCOLS = Option(help="Protocol: rows, sampled or full; repeatable; by default all that fit.")
CUT_OFFS = Option("-k", "--k", min=1, metavar="N", help="Cut-off of metrics; repeatable; by default the dataset's.")


USERS = Option(min=1, metavar="N", help="Number of users to rank under full; by default all.")
KNOWN = Option(help="Splits with known events of a user: before (all earlier ones) or train.")
COLD = Option(help="Items that training never saw: keep or drop.")
BOOTSTRAP = Option(min=0, metavar="N", help="Bootstrap draws for 95 % intervals; 0 gives none.")
AGAINST = Option(metavar="RUN", help="Run to compare with by paired tests; repeatable.")
SLICE = Option(
    "--slice",
    metavar="BY",
    help="Slices to measure apart: activity (of users), popularity (of items) or a column; repeatable.",
)
DIVERSITY = Option(
    metavar="COLUMN",
    help="Item column for the diversity of lists; by default the first categorical one.",
)
REPEATS = Option(help="Items that the user acted on before: drop or keep.")


def evaluate(
    run: Run,
    data: Data,
    split: Annotated[str, Option(help="Split to score.")] = "test",
    protocol: Annotated[list[str] | None, PROTOCOLS] = None,
    k: Annotated[list[int] | None, CUT_OFFS] = None,
    baselines: Annotated[bool, Option(help="Also fit and print the classic baselines.")] = False,
    users: Annotated[int | None, USERS] = None,
    known: Annotated[str, KNOWN] = "before",
    cold: Annotated[str, COLD] = "keep",
    repeats: Annotated[str, REPEATS] = "drop",
    bootstrap: Annotated[int, BOOTSTRAP] = 0,
    against: Annotated[list[str] | None, AGAINST] = None,
    slice_by: Annotated[list[str] | None, SLICE] = None,
    diversity: Annotated[str | None, DIVERSITY] = None,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Measure a trained model, each metric under a protocol."""
    from recspec import api

    keep_freed_memory()
    with stages(show=is_first()) as progress:
        result = api.evaluate(
            run,
            data,
            split,
            protocol=protocol,
            k=k,
            baselines=baselines,
            users=users,
            known=known,
            cold=cold,
            repeats=repeats,
            bootstrap=bootstrap,
            against=against,
            slice=slice_by,
            diversity=diversity,
            device=device,
            allow_outside=allow_outside,
            verify=verify,
            progress=progress,
        )
    if not is_first():
        return
    if json_output:
        print_json(result.to_dict())
    else:
        print_report(result.report, result.model)
    for file in result.files:
        err.print(f"{file}: kept", soft_wrap=True)
    if result.why_not_kept:
        err.print(f"note: {result.why_not_kept}", soft_wrap=True)
    print_next("report", run)


COLUMNS = Option(
    metavar="A,B",
    help="Columns to write before the added one; by default all of a file, or ids and label of a split.",
)


def predict(
    run: Run,
    rows: Annotated[Path, Argument(help="Raw rows (csv, jsonl or parquet), or a prepared dataset.", metavar="ROWS")],
    split: Annotated[str | None, Option(help="Split of a prepared dataset; by default test.")] = None,
    columns: Annotated[str | None, COLUMNS] = None,
    out_file: Annotated[
        Path | None,
        Option("--out", help="File (csv, jsonl or parquet) or folder of shards; by default standard output."),
    ] = None,
    workers: Workers = 1,
    engine: Engine = "local",
    shard_size: ShardSize = None,
    device: Device = "auto",
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Add a column `probability` to raw rows or a prepared split.

    If the model only ranks, the column is `score`.
    """
    from recspec.feature_spec import FeatureSpec
    from recspec.inference import Predictor, note_of_scores, predict_file, predict_shards, predict_split

    keep_freed_memory()
    is_prepared = rows.is_dir() or rows.suffix in (".yaml", ".yml")
    if split is not None and not is_prepared:
        raise SettingsError(f"predict: {rows} is a file of raw rows, which has no split; leave --split {split} out")
    spec = FeatureSpec.load(rows, allow_outside=allow_outside) if is_prepared else None
    chosen = [name.strip() for name in columns.split(",") if name.strip()] if columns is not None else None
    in_shards = out_file is not None and not out_file.suffix
    if not in_shards and (problems := shard_problems(workers, engine, shard_size)):
        raise SettingsError.of("predict", problems)
    predictor = Predictor.open(run, device=device, verify=verify)
    if out_file is not None and in_shards:
        started = time.perf_counter()
        with stages() as progress:
            found = predict_shards(
                predictor,
                spec or rows,
                out_file,
                how_of(workers, engine, shard_size),
                split=split or "test",
                columns=chosen,
                allow_outside=allow_outside,
                progress=progress,
                note=tell,
            )
        print_counts(out_file, found, time.perf_counter() - started, "row")
        return
    if spec is None:
        counts = predict_file(predictor, rows, out_file, columns=chosen)
    else:
        with stages() as progress:
            counts = predict_split(predictor, spec, split or "test", out_file, columns=chosen, progress=progress)
    for note in counts.notes():
        err.print(f"note: {note}")
    if not counts.rows:
        err.print(f"note: {rows} holds no row")
    if note := note_of_scores(predictor):
        err.print(f"note: {note}", soft_wrap=True)
    if out_file is not None:
        err.print(f"{out_file}: {how_many(counts.rows, 'row')}")


def print_report(report: Report, model: str) -> None:
    """Metrics by protocol, the model beside the baselines."""
    for line in report.cautions:
        out.print(f"warning: {line}", soft_wrap=True)
    for protocol in report.shown:
        metrics = report.metrics[protocol]
        beside = {name: found[protocol] for name, found in report.baselines.items() if found.get(protocol)}
        columns = (model, *(["95 %"] if protocol in report.intervals else []), *beside)
        measured = (Column(name, justify="right", style="bold" if name == model else "") for name in columns)
        table = titled_table(f"{report.split}, {report.described(protocol)}", "", *measured)
        for metric, value in metrics.items():
            others = (f"{found[metric]:.4f}" if metric in found else "" for found in beside.values())
            table.add_row(metric, f"{value:.4f}", *_interval(report, protocol, metric), *others)
        if protocol == "full":
            for measure, value in report.model.list_metrics.items():
                others = (
                    f"{found.list_metrics[measure]:.4f}" if measure in found.list_metrics else ""
                    for name, found in report.beside.items()
                    if name in beside
                )
                table.add_row(measure, f"{value:.4f}", *_interval(report, protocol, measure), *others)
        out.print(table)
        for by, parts in report.model.slices.get(protocol, {}).items():
            print_slices(f"{protocol} by {by}", parts)
    print_comparisons(report)
    for line in report.sentences:
        out.print(line, soft_wrap=True)


def _interval(report: Report, protocol: str, metric: str) -> list[str]:
    """The cell of a metric's interval, if intervals are asked for."""
    if protocol not in report.intervals:
        return []
    found = report.intervals[protocol].get(metric)
    return [f"{found.low:.4f} to {found.high:.4f}" if found else ""]


def print_comparisons(report: Report) -> None:
    """Each other run's metrics beside the model's, with the difference, its interval and the p-values."""
    from recspec.evaluation import better

    names = ("", "model", "other", "other - model", "error", "95 %", "p (t-test)", "p (permutation)", "better")
    for run, found in report.against.items():
        for protocol, metrics in found.items():
            table = titled_table(
                f"{protocol}: the model against {run}", *(Column(name, justify="right") for name in names)
            )
            for name, each in metrics.items():
                cells = (each.ours, each.theirs, each.difference, each.standard_error)
                who = {"ours": "model", "theirs": "other", "neither": ""}[better(report, run, name, each)]
                table.add_row(
                    name,
                    *(f"{cell:.4f}" for cell in cells),
                    f"{each.low:.4f} to {each.high:.4f}",
                    f"{each.p_value:.3g}",
                    f"{each.p_permutation:.3g}",
                    who,
                )
            out.print(table)


def print_slices(title: str, parts: Mapping[str, Slice]) -> None:
    """Metrics of each slice, with standard errors."""
    names = list(dict.fromkeys(name for part in parts.values() for name in part.metrics))
    table = titled_table(title, "", *(Column(name, justify="right") for name in ("count", "positives", *names)))
    for value, part in parts.items():
        cells = []
        for name in names:
            error = f" ±{part.standard_errors[name]:.4f}" if name in part.standard_errors else ""
            cells.append(f"{part.metrics[name]:.4f}{error}" if name in part.metrics else "")
        table.add_row(value, f"{part.count:,}", f"{part.positives:,}", *cells)
    out.print(table)
