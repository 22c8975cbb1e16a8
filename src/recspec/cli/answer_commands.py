"""Commands that ask a trained model: evaluate, predict, recommend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column
from typer import Argument, Option

from recspec.cli.console import err, out, print_json, stages, titled_table
from recspec.cli.options import Data, Device, Json, Outside, Run, Verify
from recspec.errors import SettingsError
from recspec.machine import keep_freed_memory
from recspec.spec import FeatureSpec

if TYPE_CHECKING:
    from recspec.evaluation import Report
    from recspec.inference import Recommendation


PROTOCOLS = Option(help="Protocol: rows, sampled or full; repeatable; by default every protocol that fits the data.")
CUT_OFFS = Option("-k", "--k", min=1, metavar="N",
                  help="Cut-off, as in MAP@12; repeatable; by default the dataset's own.")  # fmt: skip


def evaluate(
    run: Run,
    data: Data,
    split: Annotated[str, Option(help="Split to score.")] = "test",
    protocol: Annotated[list[str] | None, PROTOCOLS] = None,
    k: Annotated[list[int] | None, CUT_OFFS] = None,
    baselines: Annotated[bool, Option(help="Also fit and print the classic baselines.")] = False,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Measure a trained model, each metric under a named protocol."""
    from recspec.bundle import folder as bundle
    from recspec.distributed import join
    from recspec.evaluation import EvaluateSettings
    from recspec.evaluation import evaluate as run_evaluation
    from recspec.retrieval import Pipeline, PipelineRanker

    keep_freed_memory()
    spec = FeatureSpec.load(data, allow_outside=allow_outside)
    chosen = EvaluateSettings(ks=tuple(dict.fromkeys(k)) if k else None)
    with join(device) as ranks:
        trained = bundle.load(run, ranks=ranks, verify=verify)
        of_all = partial(PipelineRanker, trained, Pipeline.open(trained)) if trained.pipeline is not None else None
        with stages(show=ranks.is_first) as progress:
            report = run_evaluation(trained, spec, split, protocols=protocol, baselines=baselines, settings=chosen,
                                    ranks=trained.shards.evaluating, progress=progress, of_all=of_all)  # fmt: skip
        if not ranks.is_first:
            return
    if json_output:
        print_json(report.to_dict())
    else:
        print_report(report, trained.card.model)


COLUMNS = Option(metavar="A,B", help="Columns to write before `probability`; by default all columns of a file, or the "
                 "ids and the label of a split.")  # fmt: skip


def predict(
    run: Run,
    rows: Annotated[Path, Argument(help="Raw rows (csv, jsonl or parquet), or a prepared dataset.", metavar="ROWS")],
    split: Annotated[str | None, Option(help="Split of a prepared dataset; by default test.")] = None,
    columns: Annotated[str | None, COLUMNS] = None,
    out_file: Annotated[
        Path | None, Option("--out", help="Output file (csv, jsonl or parquet); by default standard output.")
    ] = None,
    device: Device = "auto",
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Add a column `probability` to raw rows, or to the rows of a prepared split."""
    from recspec.inference import Predictor, predict_file, predict_split

    keep_freed_memory()
    is_prepared = rows.is_dir() or rows.suffix in (".yaml", ".yml")
    if split is not None and not is_prepared:
        raise SettingsError(f"predict: {rows} is a file of raw rows, which has no split; leave --split {split} out")
    spec = FeatureSpec.load(rows, allow_outside=allow_outside) if is_prepared else None
    chosen = [name.strip() for name in columns.split(",") if name.strip()] if columns is not None else None
    predictor = Predictor.open(run, device=device, verify=verify)
    if spec is None:
        counts = predict_file(predictor, rows, out_file, columns=chosen)
    else:
        with stages() as progress:
            counts = predict_split(predictor, spec, split or "test", out_file, columns=chosen, progress=progress)
    for note in counts.notes():
        err.print(f"note: {note}")
    if not predictor.model.gives_logits:
        name = predictor.bundle.card.model
        err.print(f"note: the scores of {name} are no logits, so these are no probabilities; only the order counts")
    if out_file is not None:
        err.print(f"{out_file}: {counts.rows:,} rows")


def recommend(
    run: Run,
    user: Annotated[list[str] | None, Option(help="Raw user id; repeatable.")] = None,
    users: Annotated[Path | None, Option(help="File with one raw user id per line.")] = None,
    all_users: Annotated[bool, Option("--all", help="Recommend to every user of the dataset; needs --out.")] = False,
    k: Annotated[int, Option("-k", min=1, help="Number of items.")] = 10,
    include_seen: Annotated[bool, Option(help="Include items that the user acted on before.")] = False,
    out_file: Annotated[Path | None, Option("--out", help="Parquet file to write.")] = None,
    json_output: Json = False,
    device: Device = "auto",
    verify: Verify = True,
) -> None:
    """Recommend k items to users by raw id, without items they acted on in train or valid."""
    from recspec.inference import Predictor, Wanted, read_users, recommend_to_parquet

    keep_freed_memory()
    predictor = Predictor.open(run, device=device, verify=verify)
    chosen = [*(user or []), *(read_users(users) if users else [])]
    if not chosen and not all_users:
        raise SettingsError("recommend: name users with --user ID, --users FILE, or take --all with --out FILE")
    if out_file is not None and out_file.suffix != ".parquet":
        raise SettingsError(f"recommend: --out {out_file}: expected a name that ends in .parquet")
    if all_users and out_file is None:
        raise SettingsError("recommend: --all needs --out FILE.parquet")
    wanted = Wanted(users=tuple(chosen), k=k, include_seen=include_seen)
    if out_file is not None:
        started = time.perf_counter()
        with stages() as progress:
            count, unknown_users = recommend_to_parquet(
                predictor, None if all_users else chosen, out_file, wanted, progress=progress
            )
        seconds = time.perf_counter() - started
        err.print(f"{out_file}: {count:,} users, {count / seconds:,.0f} users/s")
        if unknown_users:
            err.print(f"note: {unknown_users:,} of them are unknown and got the most popular items")
        return
    answers = predictor.recommend(wanted)
    if json_output:
        print_json([answer.to_dict() for answer in answers])
    else:
        for answer in answers:
            print_recommendation(answer)


def print_report(report: Report, model: str) -> None:
    """Metrics by protocol, the model beside the baselines."""
    for protocol, metrics in report.metrics.items():
        beside = {name: found[protocol] for name, found in report.baselines.items() if found.get(protocol)}
        measured = (Column(name, justify="right", style="bold" if name == model else "") for name in (model, *beside))
        table = titled_table(f"{report.split}, {report.described(protocol)}", "", *measured)
        for metric, value in metrics.items():
            others = (f"{found[metric]:.4f}" if metric in found else "" for found in beside.values())
            table.add_row(metric, f"{value:.4f}", *others)
        out.print(table)
    for line in (*report.verdicts, *report.notes, *(f"warning: {each.message}" for each in report.warnings)):
        out.print(line, soft_wrap=True)


def print_recommendation(answer: Recommendation, liked: Sequence[str] = ()) -> None:
    """Print one user's items as a table."""
    if liked:
        out.print(f"user {answer.user} acted on, among others: {'; '.join(liked)}")
    table = titled_table(f"user {answer.user}{'' if answer.known else ': unknown, so the most popular items'}")
    titled = any(item.title for item in answer.items)
    staged = any(item.retrieved_by is not None for item in answer.items)
    for name in ("", "item", *(["title"] if titled else []), "score", *(["retrieved by"] if staged else [])):
        table.add_column(name, justify="left" if name in ("title", "retrieved by") else "right")
    for rank, item in enumerate(answer.items, start=1):
        score = f"{item.score:.4f}" if answer.known else f"{item.score:.0f}"
        brought = [", ".join(item.retrieved_by or ())] if staged else []
        table.add_row(str(rank), str(item.item), *([item.title or ""] if titled else []), score, *brought)
    out.print(table)
    for note in answer.notes:
        out.print(f"note: {note}")
