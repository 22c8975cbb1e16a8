"""The command line: what `recspec --help` lists.

Only this module prints, and only `main` gives an exit status: 0 done, 2 the user's mistake (one message), 1 our bug.
torch is loaded inside the commands that need it, so that the rest answers at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, cast, get_args, get_type_hints

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from typer.models import ArgumentInfo

from recspec import __version__, config
from recspec.errors import BundleError, Interrupted, RecspecError, SettingsError, of_the_machine, require_extra, unknown
from recspec.feature_spec import ChunkType, FeatureSpec, json_schema
from recspec.machine import pin, wait_politely
from recspec.paths import local

if TYPE_CHECKING:
    from recspec.evaluate import Report
    from recspec.predict import Recommendation
    from recspec.train import Result, TrainSettings
    from recspec.tune import Found


Command = TypeVar("Command", bound=Callable[..., Any])


class _Commands(typer.Typer):
    """Commands none of whose paths may be a URL."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Command], Command]:
        """Register a command, and have every path that it is given checked first."""
        register = super().command(*args, **settings)

        def registered(function: Command) -> Command:
            @wraps(function)
            def checked(**values: object) -> object:
                for name, value in values.items():
                    for path in value if isinstance(value, (list, tuple)) else [value]:
                        if isinstance(path, Path):
                            local(path, _told_name(function, name))
                return function(**values)

            register(checked)
            return function

        return registered


def _told_name(function: Callable[..., object], name: str) -> str:
    """An argument as `--help` shows it: `OUT`, `--recipe`."""
    _, info = get_args(get_type_hints(function, include_extras=True)[name])
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    return next((each for each in given if each.startswith("--")), f"--{name.replace('_', '-')}")


app = _Commands(
    help="Raw interaction and click logs to trained, measured and served recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = _Commands(help="Throughput and latency of models, exports and servers.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

FEW_STEPS = 5
PATIENCE = 10.0  # seconds in which the first process of a machine tells what all of them found
WIDE = 160  # columns of a table that no terminal shows, but a file or a pipe takes

out = Console(width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, soft_wrap=True)

Data = Annotated[Path, typer.Argument(help="a prepared dataset: its folder, or its specification file", metavar="DATA")]
Run = Annotated[Path, typer.Argument(help="a run's folder, or a bundle's", metavar="RUN")]
Out = Annotated[Path, typer.Argument(help="folder to write", metavar="OUT")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a setting; may be repeated")]
NOTES = ("inferred", "dropped", "changed")
Json = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
Outside = Annotated[bool, typer.Option("--allow-outside", help="files may lie outside the specification's folder")]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="compare every file with the manifest that was written with it")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]


def main() -> None:
    """Run the command line and exit with its status."""
    wait_politely()
    try:
        app()
    except Interrupted as stopped:
        if not stopped.told:
            err.print(str(stopped), markup=False, highlight=False)
        sys.exit(130)
    except RecspecError as error:
        if not error.told:
            _print_error(error)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        told = of_the_machine(error)
        if told is None:
            raise
        _print_error(RecspecError("\n".join((told, *getattr(error, "__notes__", ())))))
        sys.exit(2)


# --- data ------------------------------------------------------------------------------------------------------------


@app.command()
def prepare(
    dataset: Annotated[str, typer.Argument(help="a name from `recspec datasets`")],
    raw: Annotated[Path, typer.Argument(help="the publisher's files: a folder, a file or a zip")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write")],
    settings: Set = None,
    engine: Annotated[str, typer.Option(metavar="duckdb|spark", help="what runs the queries")] = "duckdb",
    memory_limit: Annotated[str, typer.Option(help="most memory the engine may take")] = "4GB",
    force: Annotated[bool, typer.Option(help="replace a dataset that was prepared otherwise")] = False,
) -> None:
    """Turn raw files into a prepared dataset."""
    from recspec.datasets import DATASETS
    from recspec.datasets.prepared import Remark
    from recspec.tables import ENGINES

    engine = _one_of("--engine", engine, ENGINES)
    if dataset not in DATASETS:
        raise SettingsError(unknown("dataset", dataset, DATASETS))
    chosen = DATASETS[dataset]
    values = config.assign(config.parse_assignments(settings or []), {"prepare": chosen.Settings})["prepare"]
    with _stages() as show:

        def progress(stage: str, done: float, total: float | None) -> None:
            if isinstance(stage, Remark):
                err.print(stage, markup=False, highlight=False)
            else:
                show(stage, done, total)

        prepared = chosen.prepare(
            raw,
            out_folder,
            config.build(chosen.Settings, "--set", values),
            engine=engine,
            memory_limit=memory_limit,
            force=force,
            progress=progress,
        )
    err.print(prepared.message, markup=False, highlight=False)
    _print_prepared(prepared.summary)


@app.command()
def check(data: Data, allow_outside: Outside = False) -> None:
    """Validate a specification and its files: ids in range, row counts, types."""
    from recspec import card

    spec = FeatureSpec.load(data, allow_outside=allow_outside)
    card.check(spec)
    rows = ", ".join(f"{split} {count:,} rows" for split, count in card.count_rows(spec).items())
    out.print(f"ok: {len(spec.features)} features; {rows or 'no split'}", highlight=False)


@app.command()
def describe(data: Data, json_output: Json = False, allow_outside: Outside = False) -> None:
    """A dataset card: rows, features, cardinalities, label rate, history lengths."""
    from recspec import card

    figures = card.describe(FeatureSpec.load(data, allow_outside=allow_outside)).to_dict()
    if json_output:
        _print_json(figures)
        return
    for section, value in figures.items():
        _print_section(section, value)


@app.command()
def synthesize(
    spec: Annotated[Path, typer.Argument(help="a specification whose shape the data gets")],
    out_folder: Out,
    rows: Annotated[int, typer.Option(min=1, help="rows of the train split; others get a tenth")] = 1000,
    to: Annotated[str, typer.Option(help="chunk type to write")] = "parquet",
    distribution: Annotated[str, typer.Option(metavar="uniform|power_law", help="of the ids")] = "uniform",
    seed: Annotated[int, typer.Option(help="of everything drawn")] = 0,
) -> None:
    """Random data of a specification's shape."""
    from recspec.synthesize import Distribution
    from recspec.synthesize import synthesize as run

    drawn: Distribution = _one_of("--distribution", distribution, get_args(Distribution))
    made = run(FeatureSpec.load(spec), out_folder, rows, type=_chunk_type(to), distribution=drawn, seed=seed)
    out.print(f"{made.folder}: {', '.join(made.splits)} written as {to}", highlight=False)


@app.command()
def transcode(
    data: Data,
    out_folder: Out,
    to: Annotated[str, typer.Option(help="chunk type to write")] = "parquet",
    allow_outside: Outside = False,
) -> None:
    """The same data in another chunk type; a cardinality of `auto` is resolved."""
    from recspec.storage import transcode as run

    made = run(FeatureSpec.load(data, allow_outside=allow_outside), out_folder, to=_chunk_type(to))
    out.print(f"{made.folder}: {', '.join(made.splits)} written as {to}", highlight=False)


# --- models ----------------------------------------------------------------------------------------------------------


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="a name from `recspec models`")],
    data: Data,
    run: Annotated[Path, typer.Argument(help="folder for the run: checkpoints, log and bundle", metavar="RUN")],
    recipe: Annotated[Path | None, typer.Option(help="a YAML recipe")] = None,
    settings: Set = None,
    resume: Annotated[bool, typer.Option(help="continue the run from its newest checkpoint")] = False,
    amp: Annotated[bool, typer.Option(help="mixed precision: the fastest this device has")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every automatic choice and its reason.")
    ] = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Train a model; under torchrun, on several processes."""
    from recspec.distributed import join
    from recspec.machine import keep_freed_memory
    from recspec.train import train as run_training

    keep_freed_memory()
    with _told_once():
        spec = FeatureSpec.load(data, allow_outside=allow_outside)
        model_settings, train_settings = _settings_of(model, recipe, settings or [], amp=amp)
        if train_settings.epochs == 0:
            raise SettingsError(
                "train.epochs is 0, which trains nothing and leaves a run to continue; ask for 1 or more"
            )
    _keep_to_cores(train_settings.affinity)
    with join(device, end=_end) as ranks, _stop_on_signal() as stop_requested:
        display = _TrainingDisplay(run, live=err.is_terminal and ranks.is_first, verbose=verbose)
        with display:
            result = run_training(
                model,
                spec,
                run,
                settings=train_settings,
                model_settings=model_settings,
                ranks=ranks,
                resume=resume,
                on_event=display.show,
                stop_requested=stop_requested,
            )
        if ranks.is_first:
            _print_result(result)


@app.command()
def tune(
    model: Annotated[str, typer.Argument(help="a name from `recspec models`")],
    data: Data,
    out_folder: Out,
    trials: Annotated[int, typer.Option(min=1, help="trials in all, those of earlier calls counted")] = 20,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="MINUTES", help="stop after so long; the same command goes on")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="what to search: '[16, 32, 64]', '0.0..0.5' or '1e-4..1e-2 log'; the usual settings by default",
        ),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="a YAML recipe that every trial starts from")] = None,
    settings: Set = None,
    seed: Annotated[int, typer.Option(min=0, help="of what is drawn")] = 0,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
) -> None:
    """Search for settings on valid: poor trials are stopped early, the best one's recipe is written."""
    from recspec.distributed import join
    from recspec.machine import keep_freed_memory
    from recspec.models import MODELS
    from recspec.train import TrainSettings
    from recspec.tune import Tuning, default_search, describe, parse_search

    keep_freed_memory()
    spec = FeatureSpec.load(data, allow_outside=allow_outside)
    model_settings, train_settings = _settings_of(model, recipe, settings or [], amp=False)
    values = {
        "settings": model_settings.model_dump(mode="json", exclude_defaults=True),
        "train": {"tensorboard": False, **train_settings.model_dump(mode="json", exclude_defaults=True)},
    }
    sections: dict[str, type[BaseModel]] = {"settings": MODELS[model].Settings, "train": TrainSettings}
    asked = parse_search(config.parse_assignments(search or []), sections) or default_search(model, values)
    _step(f"searching {describe(asked)}")
    with join(device, end=_end) as ranks, _stop_on_signal() as stop_requested:
        if ranks.world_size > 1:
            raise SettingsError("tune: one process a search; start it without torchrun")
        found = Tuning(
            model, spec, out_folder, values, asked, trials, budget, seed, ranks, _show_trial, stop_requested
        ).run()
    if json_output:
        _print_json(found.to_dict())
    else:
        _print_found(found)


@app.command()
def evaluate(
    run: Run,
    data: Data,
    split: Annotated[str, typer.Option(help="which split to score")] = "test",
    protocol: Annotated[list[str] | None, typer.Option(help="rows, sampled or full; all that fit by default")] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "-k",
            "--k",
            min=1,
            metavar="N",
            help="a cut-off, as in MAP@12; may be repeated; the dataset's own by default",
        ),
    ] = None,
    baselines: Annotated[bool, typer.Option(help="fit the classic baselines and print them beside")] = False,
    json_output: Json = False,
    device: Device = "auto",
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Metrics of a trained model, each under a named protocol."""
    from recspec import bundle
    from recspec.distributed import join
    from recspec.evaluate import EvaluateSettings
    from recspec.evaluate import evaluate as run_evaluation
    from recspec.machine import keep_freed_memory

    keep_freed_memory()
    spec = FeatureSpec.load(data, allow_outside=allow_outside)
    chosen = EvaluateSettings(ks=tuple(dict.fromkeys(k)) if k else None)
    with join(device, end=_end) as ranks:
        trained = bundle.load(run, ranks=ranks, verify=verify)
        with _stages(show=ranks.is_first) as progress:
            report = run_evaluation(
                trained,
                spec,
                split,
                protocols=protocol,
                baselines=baselines,
                settings=chosen,
                ranks=trained.shards.evaluating,
                progress=progress,
            )
        if not ranks.is_first:
            return
    if json_output:
        _print_json(report.to_dict())
    else:
        _print_report(report, trained.card.model)


@app.command()
def predict(
    run: Run,
    rows: Annotated[Path, typer.Argument(help="raw rows (csv, jsonl, parquet), or a prepared dataset", metavar="ROWS")],
    split: Annotated[str | None, typer.Option(help="which split of a prepared dataset; test by default")] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="columns to write before `probability`; of a file all, of a split the ids"),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="file to write: csv, jsonl or parquet; standard output without")
    ] = None,
    device: Device = "auto",
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """Raw rows with a column `probability` added; or each row of a prepared split."""
    from recspec.machine import keep_freed_memory
    from recspec.predict import Predictor, predict_file, predict_split

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
        with _stages() as progress:
            counts = predict_split(predictor, spec, split or "test", out_file, columns=chosen, progress=progress)
    for note in counts.notes():
        err.print(f"note: {note}", markup=False, highlight=False)
    if out_file is not None:
        err.print(f"{out_file}: {counts.rows:,} rows", highlight=False)


@app.command()
def recommend(
    run: Run,
    user: Annotated[list[str] | None, typer.Option(help="a raw user id; may be repeated")] = None,
    users: Annotated[Path | None, typer.Option(help="a file with a raw user id a line")] = None,
    all_users: Annotated[bool, typer.Option("--all", help="every user of the dataset; needs --out")] = False,
    k: Annotated[int, typer.Option("-k", min=1, help="how many items")] = 10,
    include_seen: Annotated[bool, typer.Option(help="also items the user acted on before")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Parquet file to write")] = None,
    json_output: Json = False,
    device: Device = "auto",
    verify: Verify = True,
) -> None:
    """The k best items for raw user ids, without those they acted on in train or valid."""
    from recspec.machine import keep_freed_memory
    from recspec.predict import Predictor, read_users, recommend_to_parquet

    keep_freed_memory()
    predictor = Predictor.open(run, device=device, verify=verify)
    chosen = [*(user or []), *(read_users(users) if users else [])]
    if not chosen and not all_users:
        raise SettingsError("recommend: name users with --user ID, --users FILE, or take --all with --out FILE")
    if out_file is not None and out_file.suffix != ".parquet":
        raise SettingsError(f"recommend: --out {out_file}: expected a name that ends in .parquet")
    if all_users and out_file is None:
        raise SettingsError("recommend: --all needs --out FILE.parquet")
    if out_file is not None:
        started = time.perf_counter()
        with _stages() as progress:
            count, unknown_users = recommend_to_parquet(
                predictor, None if all_users else chosen, out_file, k=k, include_seen=include_seen, progress=progress
            )
        seconds = time.perf_counter() - started
        err.print(f"{out_file}: {count:,} users, {count / seconds:,.0f} users/s", highlight=False)
        if unknown_users:
            err.print(f"note: {unknown_users:,} of them are unknown and got the most popular items", highlight=False)
        return
    answers = predictor.recommend(chosen, k=k, include_seen=include_seen)
    if json_output:
        _print_json([answer.to_dict() for answer in answers])
        return
    for answer in answers:
        _print_recommendation(answer)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="a run's folder, a bundle's or an export's", metavar="RUN")],
    expect: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="the digest that an earlier `recspec verify` printed")
    ] = None,
) -> None:
    """Compare every file of a trained model with its manifest; print the manifest's digest."""
    from recspec import bundle, manifest
    from recspec.programs import find_export

    folder = find_export(run) or bundle.find(run)
    digest = manifest.check(folder)
    if digest is None:
        raise BundleError(f"{folder}: has no manifest.json to compare with")
    if expect is not None and digest != expect.strip().lower():
        raise BundleError(f"{folder}: its manifest has the digest {digest}; expected {expect}")
    out.print(f"{digest}  {folder}", highlight=False, markup=False)


@app.command("import-tf")
def import_tf(
    model: Annotated[Path, typer.Argument(help="a SavedModel's folder, a folder of checkpoints, or a prefix")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder for the bundle")],
    columns: Annotated[Path, typer.Option(metavar="FILE", help="JSON file that describes the feature columns")],
    force: Annotated[bool, typer.Option("--force", help="replace a bundle that is there")] = False,
) -> None:
    """A Wide & Deep model of TensorFlow's estimators becomes a bundle, without TensorFlow."""
    from recspec.import_tf import import_tf as run

    imported = run(model, out_folder, columns, force=force)
    for note in imported.notes:
        err.print(f"note: {note}", markup=False, highlight=False)
    _print_figures(f"imported into {imported.folder}", imported.summary)


@app.command()
def export(
    run: Run,
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write; with triton, the repository")],
    format_: Annotated[str, typer.Option("--format", metavar="onnx|pt2|triton", help="what to make")] = "onnx",
    precision: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16|int8", help="of weights and matrix products")
    ] = "fp32",
    form: Annotated[
        str, typer.Option(metavar="rows|ranker", help="rows: any rows; ranker: one request's features, N candidates'")
    ] = "rows",
    data: Annotated[
        Path | None, typer.Option(help="a prepared dataset to check the program on; made-up rows without")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="mean difference of probabilities that is allowed, the largest 20 times that")
    ] = None,
    allow_drift: Annotated[bool, typer.Option(help="write a program that drifts beyond the tolerance")] = False,
    name: Annotated[str | None, typer.Option(help="of the model in a Triton repository")] = None,
    triton_backend: Annotated[
        str,
        typer.Option(metavar="onnxruntime|python", help="python runs on a server without ONNX Runtime's backend"),
    ] = "onnxruntime",
    batch_sizes: Annotated[str, typer.Option(metavar="A,B", help="at which latency is measured")] = "1,64,512,4096",
    threads: Annotated[int | None, typer.Option(min=1, help="that compute a call while it is measured")] = None,
    json_output: Json = False,
    allow_outside: Outside = False,
    verify: Verify = True,
) -> None:
    """A trained model as a program (ONNX, AOTInductor, Triton), checked against the bundle at once."""
    from recspec import bundle
    from recspec.export import ExportSettings
    from recspec.export import export as run_export
    from recspec.machine import keep_freed_memory

    keep_freed_memory()
    settings = ExportSettings(
        format=cast(Any, format_),  # the settings say which there are, of all of them at once
        precision=cast(Any, precision),
        form=cast(Any, form),
        tolerance=tolerance,
        allow_drift=allow_drift,
        batch_sizes=_sizes("--batch-sizes", batch_sizes),
        threads=threads,
        name=name,
        triton_backend=cast(Any, triton_backend),
    )
    spec = FeatureSpec.load(data, allow_outside=allow_outside) if data is not None else None
    made = run_export(bundle.load(run, verify=verify), out_folder, settings, spec, tell=_tell)
    if json_output:
        _print_json(made.sheet)
    else:
        _print_sheet(made.folder, made.sheet)


def end_by_force(why: str) -> None:
    """End the process with status 1, whatever its threads do."""
    logging.getLogger("recspec.serve").error("the server ends by force: %s", why)
    logging.shutdown()
    os._exit(1)


@app.command()
def serve(
    models: Annotated[
        list[str], typer.Argument(metavar="[NAME=]RUN...", help="runs, bundles, exports; or folders 1, 2, ... of them")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines in, and wants a token.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65_535, help="HTTP port; 0 picks a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=65_535, help="gRPC port; 0 picks a free one.")] = 8001,
    grpc: Annotated[bool, typer.Option("--grpc/--no-grpc", help="Answer over gRPC too.")] = True,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the bearer token that clients must send; by default the variable RECSPEC_TOKEN."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients call the server by, besides localhost and the address; repeatable."),
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Let clients load and unload models; wants a token.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without a token, where --host does.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate in PEM, with its chain: HTTPS, and gRPC over TLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key in PEM, without a password.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="rows that are computed together")] = 4096,
    max_delay_ms: Annotated[float, typer.Option(min=0, help="that an idle model waits for others to join")] = 0.0,
    queue: Annotated[int, typer.Option(min=1, help="requests of a model that may wait; more get 503")] = 512,
    max_rows: Annotated[int, typer.Option(min=1, help="of a request; more get 413")] = 65_536,
    max_body_mb: Annotated[float, typer.Option(help="MiB of a request; a larger one gets 413")] = 32,
    max_held_mb: Annotated[
        float, typer.Option(help="MiB of all requests that are being answered; more get 503.")
    ] = 512,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Requests answered at once, by protocol; more get 503.")
    ] = 1024,
    timeout: Annotated[float, typer.Option(help="seconds from a request to its answer, else 504")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="that compute a batch; torch's own number without")] = None,
    watch: Annotated[float, typer.Option(min=0, help="seconds between looks for new models; 0: never")] = 5.0,
    json_output: Json = False,
    device: Device = "cpu",
    verify: Verify = True,
) -> None:
    """Answer over HTTP and gRPC: the Open Inference Protocol, JSON for people, and a page to try it."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # or else each refused call writes a line, which clients choose
    for library in ("starlette", "uvicorn", "httptools", "orjson", *(("grpc", "tritonclient") if grpc else ())):
        require_extra(library, "serve")
    from recspec.access import read_token
    from recspec.batching import Limits
    from recspec.repository import RepositorySettings, sources_of
    from recspec.serve import Addresses, ServeSettings
    from recspec.serve import serve as run_server

    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    sources = sources_of(models)
    limits = {"max_batch_rows": max_batch, "max_delay_ms": max_delay_ms, "max_queue": queue, "max_rows": max_rows,
              "max_body_bytes": int(max_body_mb * 2**20), "max_held_bytes": int(max_held_mb * 2**20),
              "max_requests": max_requests, "timeout_seconds": timeout}  # fmt: skip
    listening = {"host": host, "http_port": http_port, "grpc_port": grpc_port if grpc else None,
                 "allowed_hosts": tuple(allowed_host or ()), "insecure": insecure, "tls_cert": tls_cert,
                 "tls_key": tls_key}  # fmt: skip

    def ready(addresses: Addresses) -> None:
        if json_output:
            _print_json({"http": addresses.http, "grpc": addresses.grpc, "models": [each.name for each in sources]})
            sys.stdout.flush()
        names, grpc_told = ", ".join(each.name for each in sources), f", gRPC at {addresses.grpc}"
        told = f"{names} at {addresses.http} (a page to try it; /docs: routes){grpc_told if addresses.grpc else ''}"
        err.print(told, highlight=False, markup=False)

    run_server(
        sources,
        config.build(ServeSettings, "serve", listening),
        repository=config.build(
            RepositorySettings,
            "serve",
            {
                "device": device,
                "threads": threads,
                "watch_seconds": watch,
                "verify": verify,
                "control": control,
            },
        ),
        limits=config.build(Limits, "serve", limits),
        token=read_token(os.environ, token_file),
        ready=ready,
        force=end_by_force,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # all is closed; gRPC's and torch's own threads now and then abort an interpreter that ends the long way


# --- what there is ---------------------------------------------------------------------------------------------------


@app.command()
def models(json_output: Json = False) -> None:
    """The models, the roles they need and their settings; and the settings of training."""
    from recspec.models import MODELS
    from recspec.train import TrainSettings

    if json_output:
        listing = {
            name: {"needs": list(model.needs), "settings": model.Settings.model_json_schema()["properties"]}
            for name, model in MODELS.items()
        }
        _print_json({"models": listing, "train": TrainSettings.model_json_schema()["properties"]})
        return
    for name, model in MODELS.items():
        out.print(f"[bold]{name}[/bold]  {_first_line(model.__doc__)}  needs: {', '.join(model.needs)}")
        _print_settings(f"settings of {name}", model.Settings)
    _print_settings("settings of training (--set train.NAME=VALUE)", TrainSettings)


@app.command()
def datasets(json_output: Json = False) -> None:
    """The datasets that `recspec prepare` knows, the files they take and their settings."""
    from recspec.datasets import DATASETS

    if json_output:
        _print_json({name: dataset.Settings.model_json_schema()["properties"] for name, dataset in DATASETS.items()})
        return
    for name, dataset in DATASETS.items():
        out.print(f"[bold]{name}[/bold]  {dataset.about}")
        _print_settings(f"settings of {name}", dataset.Settings)


@app.command()
def schema() -> None:
    """The JSON Schema of a specification file, for editors."""
    _print_json(json_schema())


@app.command()
def version() -> None:
    """The version of recspec."""
    out.print(__version__, highlight=False)


@bench_app.command("train")
def bench_train(
    model: Annotated[str, typer.Argument(help="a name from `recspec models`")],
    data: Annotated[
        Path | None, typer.Option(help="a prepared dataset; made-up data of a published shape without")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="a YAML recipe")] = None,
    settings: Set = None,
    steps: Annotated[int, typer.Option(min=1, help="measured steps")] = 50,
    warmup: Annotated[int, typer.Option(min=0, help="steps before the clock starts")] = 5,
    amp: Annotated[bool, typer.Option(help="mixed precision")] = False,
    profile: Annotated[bool, typer.Option(help="say where the time of a step goes")] = False,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Training speed in samples/s, and as shares of the machine's measured matrix rate and memory bandwidth."""
    from recspec.bench import bench_training
    from recspec.distributed import join
    from recspec.machine import keep_freed_memory

    keep_freed_memory()
    model_settings, train_settings = _settings_of(model, recipe, settings or [], amp=amp)
    spec = FeatureSpec.load(data) if data is not None else None
    _keep_to_cores(train_settings.affinity)
    with join(device, end=_end) as ranks:
        figures = bench_training(
            model,
            spec,
            settings=train_settings,
            model_settings=model_settings,
            ranks=ranks,
            steps=steps,
            warmup=warmup,
            profiled=PROFILED_STEPS if profile else 0,
        )
        if not ranks.is_first:
            return
    if json_output:
        _print_json(figures)
        return
    tables = cast(Mapping[str, Any], figures.pop("profile", {}))
    _print_figures(f"training {model}", figures)
    for name, title in (("parts", "parts of a step"), ("operations", "operations"), ("largest", "the largest")):
        if name in tables:
            _print_lines(title, tables[name])


PROFILED_STEPS = 5


@app.command()
def demo(
    raw: Annotated[Path | None, typer.Option(help="real MovieLens files instead of made-up ones")] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="folder for everything the demo writes")] = Path("demo"),
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training rows")] = 8,
) -> None:
    """The whole story: prepare, train, evaluate beside baselines, recommend."""
    from recspec import bundle
    from recspec.datasets import DATASETS
    from recspec.datasets.synthetic import write_movielens_like
    from recspec.evaluate import evaluate as run_evaluation
    from recspec.machine import keep_freed_memory
    from recspec.predict import Predictor

    keep_freed_memory()
    started = time.perf_counter()
    out_folder.mkdir(parents=True, exist_ok=True)
    if raw is None:
        raw = out_folder / "raw"
        _step(f"made-up ratings in the layout of MovieLens, in {raw}")
        if not (raw / "ratings.csv").exists():
            write_movielens_like(raw, num_users=2000, num_items=1500, num_ratings=150_000, seed=0)
    movielens = DATASETS["movielens"]
    data = out_folder / "data"
    _step(f"recspec prepare movielens {raw} {data}")
    with _stages() as progress:
        prepared = movielens.prepare(
            raw, data, movielens.Settings(), engine="duckdb", memory_limit="2GB", force=True, progress=progress
        )
    _print_prepared(prepared.summary)

    run = _fresh_folder(out_folder, "run")
    assignments = [*DEMO_SETTINGS, f"train.epochs={epochs}"]
    _step(f"recspec train neumf {data} {run} {' '.join(f'--set {assignment}' for assignment in assignments)}")
    train("neumf", data, run, settings=assignments)

    _step(f"recspec evaluate {run} {data} --baselines")
    trained = bundle.load(run)
    with _stages() as progress:
        report = run_evaluation(trained, FeatureSpec.load(data), "test", baselines=True, progress=progress)
    _print_report(report, "neumf")

    predictor = Predictor.open(run)
    user = predictor.busiest_user()
    _step(f"recspec recommend {run} --user {user} -k 10")
    _print_recommendation(predictor.recommend([user], k=10)[0], liked=predictor.liked(user, k=5))
    err.print(f"\ndone in {time.perf_counter() - started:.0f} s; all of it is in {out_folder}", highlight=False)


DEMO_SETTINGS = (
    "settings.factors=64",
    "settings.layers=[64,64,32]",
    "settings.dropout=0.0",
    "settings.item_bias=true",
    "settings.l2=0.012",
    "settings.l2_hidden=0.08",
    "train.batch_size=8192",
    "train.negatives=8",
    "train.learning_rate=0.004",
    "train.schedule=linear",
)


@bench_app.command("infer")
def bench_infer(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN|EXPORT...", help="runs and exports, side by side")],
    batch_sizes: Annotated[str, typer.Option(metavar="A,B", help="rows of a call")] = "1,64,512,4096",
    threads: Annotated[str | None, typer.Option(metavar="A,B", help="that compute a call; all cores' without")] = None,
    form: Annotated[str, typer.Option(metavar="rows|ranker", help="of runs; an export has its own")] = "rows",
    seconds: Annotated[float, typer.Option(help="of measuring, for each line of the table")] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="calls before the clock starts")] = 10,
    json_output: Json = False,
    verify: Verify = True,
) -> None:
    """Latency (p50 to p99) and rows/s of models and their exports on this machine, by batch size."""
    from recspec.bench import bench_inference
    from recspec.machine import keep_freed_memory
    from recspec.signature import FORMS

    keep_freed_memory()
    figures = bench_inference(
        paths,
        batch_sizes=_sizes("--batch-sizes", batch_sizes),
        threads=_sizes("--threads", threads) if threads is not None else (),
        form=_one_of("--form", form, FORMS),
        seconds=seconds,
        warmup=warmup,
        verify=verify,
    )
    if json_output:
        _print_json(figures)
    else:
        _print_lines("answering", cast(Sequence[Mapping[str, object]], figures["measured"]))


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Argument(help="of a running server, such as http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="its name; may be left out where there is one")] = None,
    concurrency: Annotated[str, typer.Option(metavar="A,B", help="clients that ask at once")] = "1,2,4,8",
    rows: Annotated[int, typer.Option(min=1, help="of a request")] = 1,
    seconds: Annotated[float, typer.Option(help="of measuring, for each line of the table")] = 5.0,
    warmup: Annotated[float, typer.Option(min=0, help="seconds of asking before the clock starts")] = 1.0,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token; by default the variable RECSPEC_TOKEN.")
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(help="Certificates in PEM that the server's own is checked with; by default the machine's."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Latency (p50 to p99) and requests/s of a running server, by number of clients."""
    from recspec.access import read_token
    from recspec.sweep import Server, sweep

    figures = sweep(
        Server(url, read_token(os.environ, token_file), tls_ca),
        model=model,
        concurrency=_sizes("--concurrency", concurrency),
        rows=rows,
        seconds=seconds,
        warmup=warmup,
    )
    if json_output:
        _print_json(figures)
    else:
        _print_lines(f"{figures['model']} at {url}", cast(Sequence[Mapping[str, object]], figures["measured"]))


# --- settings --------------------------------------------------------------------------------------------------------


def _settings_of(
    model: str, recipe: Path | None, assignments: Sequence[str], *, amp: bool
) -> tuple[config.Settings, TrainSettings]:
    """The model's settings and the trainer's: a recipe's, with `--set` over them."""
    from recspec.models import MODELS
    from recspec.train import TrainSettings

    if model not in MODELS:
        raise SettingsError(unknown("model", model, MODELS))
    loaded = config.load_recipe(recipe) if recipe is not None else config.Recipe()
    if loaded.model not in (None, model):
        raise SettingsError(f"recipe {recipe} is for the model '{loaded.model}', not '{model}'")
    given = [name for name, there in ((f"recipe {recipe}", recipe is not None), ("--set", assignments)) if there]
    where = " and ".join(given) or "settings"
    assigned = config.assign(
        config.parse_assignments(assignments), {"settings": MODELS[model].Settings, "train": TrainSettings}
    )
    faster = {"precision": "auto"} if amp else {}
    made: list[BaseModel] = []
    problems: list[str] = []
    for settings_type, layers in (
        (MODELS[model].Settings, (loaded.settings, assigned["settings"])),
        (TrainSettings, (loaded.train, faster, assigned["train"])),
    ):
        try:
            made.append(config.build(settings_type, where, *layers))
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError.of(where, problems)
    model_settings, train_settings = made
    return cast(config.Settings, model_settings), cast(TrainSettings, train_settings)


def _keep_to_cores(affinity: str) -> None:
    """Pin this process to its cores, with a thread for each."""
    import torch

    from recspec.distributed import place

    cores = pin(affinity, *place())
    if cores is not None:
        torch.set_num_threads(len(cores))


def _sizes(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on between commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SettingsError(f"{option} {text!r}: expected whole numbers from 1 between commas, such as 1,64,512")
    return tuple(map(int, parts))


def _chunk_type(name: str) -> ChunkType:
    return cast(ChunkType, _one_of("--to", name, get_args(ChunkType), "chunk type"))


Choice = TypeVar("Choice", bound=str)


def _one_of(option: str, value: str, known: Sequence[Choice], kind: str = "value") -> Choice:
    """The value of an option that has so many; typer's own message names no nearest one."""
    for each in known:
        if each == value:
            return each
    raise SettingsError(f"{option}: {unknown(kind, value, known)}")


def _fresh_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first of `name-2`, `name-3`, ... that is not there yet."""
    number = 1
    while (parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return parent / (name if number == 1 else f"{name}-{number}")


@contextmanager
def _told_once() -> Iterator[None]:
    """A mistake in what all processes of a machine read alike is told by the first of them.

    The others wait: torchrun ends them once the first has ended. One that is still here after that saw what the first
    did not, and tells it.
    """
    try:
        yield
    except RecspecError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE)
        raise


def _end(error: RecspecError) -> None:
    """End at once, wherever this process waits."""
    err.show_cursor()
    _print_error(error)
    os._exit(2)


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask the run to write a checkpoint and stop; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_error(error: RecspecError) -> None:
    err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


# --- display ---------------------------------------------------------------------------------------------------------


class Stage(Protocol):
    """Told how far a stage is; total is None where it is not known."""

    def __call__(self, stage: str, done: float, total: float | None) -> None: ...


@contextmanager
def _stages(*, show: bool = True) -> Iterator[Stage]:
    """A live bar a stage on a terminal, with the time it took and the time left; nothing elsewhere."""
    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
        TimeRemainingColumn(), console=err, disable=not (show and err.is_terminal), transient=True,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}

    def progress(stage: str, done: float, total: float | None) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total)

    with bars:
        yield progress


class _TrainingDisplay:
    """What a run shows while it goes: a live line on a terminal, one plain line an epoch elsewhere."""

    def __init__(self, run: Path, *, live: bool, verbose: bool) -> None:
        self.run, self.verbose = run, verbose
        columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
        self.bars = Progress(*columns, console=err, disable=not live, transient=True)
        self.task: TaskID | None = None

    def __enter__(self) -> _TrainingDisplay:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def show(self, event: Mapping[str, object]) -> None:
        """Show one event of the run."""
        kind = event["event"]
        if kind == "start":
            self._start(event)
        elif kind == "step" and self.task is not None:
            loss, speed = _number(event, "loss"), _number(event, "samples_per_second")
            text = f"epoch {_number(event, 'epoch'):.1f}  loss {loss:.4f}  {speed:,.0f} samples/s"
            self.bars.update(self.task, completed=_number(event, "step"), description=text)
        elif kind == "epoch":
            err.print(_epoch_line(event), highlight=False, markup=False)
        elif kind == "note":
            err.print(f"note: {event['message']}", highlight=False, markup=False)

    def _start(self, event: Mapping[str, object]) -> None:
        rows, negatives = _number(event, "rows"), _number(event, "negatives")
        drawn = f" and {negatives:.0f} drawn negatives each" if negatives else ""
        steps = _number(event, "steps_per_epoch")
        epochs = _number(event, "steps") / max(1, steps)
        err.print(
            f"{event['model']}: {_number(event, 'parameters'):,.0f} parameters{_frozen(event)}; "
            f"{rows:,.0f} rows{drawn}\n"
            f"{event['device']}, {event['threads']} threads; "
            f"precision {event['precision']}: {event['precision_reason']}\n"
            f"{steps:,.0f} {'step' if steps == 1 else 'steps'} an epoch, {event['batch_size']:,} rows each; "
            f"{epochs:.0f} {'epoch' if epochs == 1 else 'epochs'}; "
            + (f"valid {event['metric']} is measured" if event["metric"] else "no split valid to measure on"),
            highlight=False,
            markup=False,
        )
        choices = event.get("choices")
        if self.verbose:
            for name, what in choices.items() if isinstance(choices, Mapping) else ():
                if name != "precision":
                    err.print(f"{name}: {what}", highlight=False, markup=False)
        else:
            err.print(f"all choices and their reasons: -v, or {self.run / 'log.jsonl'}", highlight=False, markup=False)
        for line in _placement_lines(event):
            err.print(line, highlight=False, markup=False)
        if event["not_read"]:
            err.print(f"not read by this model: {_cell(event['not_read'])}", highlight=False, markup=False)
        if steps < FEW_STEPS < rows:
            err.print(
                f"note: few steps an epoch; a train.batch_size under {event['batch_size']} takes more of them",
                highlight=False,
                markup=False,
            )
        if _number(event, "resumed_at_step"):
            epoch = _number(event, "resumed_at_step") / max(1, _number(event, "steps_per_epoch"))
            err.print(f"continuing from step {event['resumed_at_step']}, {epoch:.1f} epochs in", highlight=False)
        self.task = self.bars.add_task("training", total=_number(event, "steps"))


def _frozen(event: Mapping[str, object]) -> str:
    """How many parameters are trained, and which parts are not, where any is frozen."""
    frozen = event.get("frozen")
    if not isinstance(frozen, Mapping) or not frozen:
        return ""
    parts = ", ".join(f"{part} ({size:,})" for part, size in frozen.items())
    return f", {_number(event, 'trained_parameters'):,.0f} of them trained; frozen: {parts}"


def _placement_lines(event: Mapping[str, object]) -> list[str]:
    """Which rank holds which tables, where they are divided, and which lie on the host."""
    sharding, offloaded = event.get("sharding"), event.get("offloaded")
    lines = [f"{event['placement_reason']}"] if sharding else []
    if isinstance(sharding, list) and len(sharding) > 1:
        lines += [f"{line}" for line in sharding]
    if isinstance(offloaded, list) and offloaded:
        lines.append(f"in the host's memory: {', '.join(offloaded)}")
    return lines


def _epoch_line(event: Mapping[str, object]) -> str:
    line = (
        f"epoch {_number(event, 'epoch'):.0f}/{_number(event, 'epochs'):.0f}  "
        f"loss {_number(event, 'train_loss'):.4f}  {_number(event, 'samples_per_second'):,.0f} samples/s"
    )
    metrics = event.get("metrics")
    metric = str(event.get("metric"))
    protocol, _, name = metric.partition("/")
    values = metrics.get(protocol) if isinstance(metrics, Mapping) else None
    if isinstance(values, Mapping) and name in values:
        best = " (best)" if event.get("best_epoch") == event.get("epoch") else ""
        line += f"  valid {metric} {values[name]:.4f}{best}"
    return line


def _show_trial(trial: int, event: Mapping[str, object]) -> None:
    """One line an epoch of each trial, while it goes."""
    if event["event"] == "epoch":
        err.print(f"trial {trial}  {_epoch_line(event)}", highlight=False, markup=False)


def _print_found(found: Found) -> None:
    """The trials, best first, and where the best recipe is."""
    order = sorted(found.trials, key=lambda trial: (trial is not found.best, trial.state != "complete", trial.number))
    table = _titled_table(f"{len(order)} trials, {found.metric} on valid")
    for name in ("trial", "value", "", "seconds", "settings"):
        table.add_column(name, justify="right" if name in ("trial", "value", "seconds") else "left")
    for trial in order:
        told = "best" if trial is found.best else trial.state
        table.add_row(
            f"{trial.number}",
            "" if trial.value is None else f"{trial.value:.5f}",
            f"{told}: {_first_line(trial.reason)}" if trial.reason else told,
            "" if trial.seconds is None else f"{trial.seconds:.1f}",
            ", ".join(f"{name.partition('.')[2]} {_cell(value)}" for name, value in trial.settings.items()),
        )
    out.print(table)
    if found.best is not None:
        out.print(f"{found.recipe}: the best recipe; its bundle lies beside", highlight=False)
    if found.left:
        out.print(f"{found.left} trials are left; the same command goes on", highlight=False)


def _print_result(result: Result) -> None:
    where = f"{result.bundle}: bundle of epoch {result.best_epoch:g}"
    speed = f"{result.samples_per_second:,.0f} samples/s, {result.seconds:.1f} s"
    why = "" if result.stopped == "epochs" else f", stopped by {result.stopped}"
    err.print(f"{where}; {speed}{why}", highlight=False, markup=False)


def _print_report(report: Report, model: str) -> None:
    """Metrics by protocol, the model beside the baselines."""
    for protocol, metrics in report.metrics.items():
        beside = {name: found[protocol] for name, found in report.baselines.items() if found.get(protocol)}
        table = _titled_table(f"{report.split}, {report.described(protocol)}")
        table.add_column("")
        for name in (model, *beside):
            table.add_column(name, justify="right", style="bold" if name == model else "")
        for metric, value in metrics.items():
            others = (f"{found[metric]:.4f}" if metric in found else "" for found in beside.values())
            table.add_row(metric, f"{value:.4f}", *others)
        out.print(table)
    for line in (*report.verdicts, *report.notes):
        out.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_recommendation(answer: Recommendation, liked: Sequence[str] = ()) -> None:
    if liked:
        out.print(f"user {answer.user} acted on, among others: {'; '.join(liked)}", highlight=False, markup=False)
    title = f"user {answer.user}" if answer.known else f"user {answer.user}: unknown, so the most popular items"
    table = _titled_table(title)
    titled = any(item.title for item in answer.items)
    for name in ("", "item", *(["title"] if titled else []), "score"):
        table.add_column(name, justify="left" if name == "title" else "right")
    for rank, item in enumerate(answer.items, start=1):
        score = f"{item.score:.4f}" if answer.known else f"{item.score:.0f}"
        table.add_row(str(rank), str(item.item), *([item.title or ""] if titled else []), score)
    out.print(table)
    for note in answer.notes:
        out.print(f"note: {note}", highlight=False, markup=False)


def _print_sheet(folder: Path, sheet: Mapping[str, Any]) -> None:
    """What an export is, how far it is from the bundle, and how fast."""
    figures = {"precision": f"{sheet['precision']}: {sheet['computed']}", "checked on": sheet["checked_on"]}
    figures |= {f"{name} |dp|": f"{sheet['difference'][name]:.2g}" for name in ("mean", "largest")}
    figures |= {"AUC": sheet["auc"], "bytes": sheet["size_bytes"], **sheet.get("triton", {})}
    _print_figures(f"{folder}: {sheet['model']} as {sheet['format']}", figures)
    _print_lines(f"latency, {sheet['threads']} threads", sheet["latency"])
    if sheet["difference"]["drifts"]:
        err.print("note: the program drifts beyond its tolerance; it was written all the same", highlight=False)


def _print_lines(title: str, lines: Sequence[Mapping[str, object]]) -> None:
    """A table of lines that hold the same figures."""
    table = _titled_table(title)
    for name in lines[0]:
        table.add_column(name, justify="left" if isinstance(lines[0][name], str) else "right")
    for line in lines:
        table.add_row(*(_cell(value) for value in line.values()))
    out.print(table)


def _print_settings(title: str, model: type[BaseModel]) -> None:
    table = _titled_table(title)
    for name in ("name", "default", "what it is"):
        table.add_column(name)
    for name, field in model.model_fields.items():
        default = (
            "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True), default=str)
        )
        table.add_row(name, escape(default), escape(field.description or ""))
    out.print(table)


def _print_section(title: str, value: object) -> None:
    """A table with one row a name where the value is a table, else names and figures, else one line."""
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        columns = [
            column
            for column in dict.fromkeys(column for row in value.values() for column in row)
            if any(_cell(row.get(column)) for row in value.values())
        ]
        table = _titled_table(title)
        for column in ("", *columns):
            table.add_column(column, overflow="fold")
        for name, row in value.items():
            table.add_row(str(name), *(_cell(row.get(column)) for column in columns))
        out.print(table)
    elif isinstance(value, Mapping) and value:
        _print_figures(title, value)
    elif _cell(value):
        out.print(f"{title}: {_cell(value)}", highlight=False, markup=False)


def _titled_table(title: str) -> Table:
    """An empty table under its title, which is a line of its own so that a narrow table does not cut it."""
    out.print(f"\n{title}", style="bold", highlight=False, markup=False)
    return Table()


def _print_prepared(summary: Mapping[str, object]) -> None:
    """What a preparation counted, then what it inferred, dropped and changed, a line each."""
    notes = {name: summary[name] for name in NOTES if name in summary}
    _print_figures("prepared", {name: value for name, value in summary.items() if name not in notes})
    for name, sentences in notes.items():
        out.print(name, style="bold")
        for sentence in sentences if isinstance(sentences, list) else [sentences]:
            out.print(f"  - {sentence}", markup=False, highlight=False, soft_wrap=True)


def _print_figures(title: str, figures: Mapping[str, object]) -> None:
    table = _titled_table(title)
    table.show_header = False
    for name, value in figures.items():
        table.add_row(name, _cell(value))
    out.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_cell(part) for part in value)
    return str(value)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _tell(stage: str) -> None:
    """A line for each stage of a command that takes its time."""
    err.print(f"{stage} ...", highlight=False, markup=False)


def _step(text: str) -> None:
    err.print(f"\n▸ {text}", style="bold", highlight=False, markup=False)


def _number(event: Mapping[str, object], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
