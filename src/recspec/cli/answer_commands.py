"""Commands that ask a trained model: evaluate, predict."""

from __future__ import annotations

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

    keep_freed_memory()
    spec = FeatureSpec.load(data, allow_outside=allow_outside)
    chosen = EvaluateSettings(ks=tuple(dict.fromkeys(k)) if k else None)
    with join(device) as ranks:
        trained = bundle.load(run, ranks=ranks, verify=verify)
        with stages(show=ranks.is_first) as progress:
            report = run_evaluation(trained, spec, split, protocols=protocol, baselines=baselines, settings=chosen,
                                    ranks=trained.shards.evaluating, progress=progress)  # fmt: skip
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
