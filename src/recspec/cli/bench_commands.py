"""Commands that measure: bench train, bench infer, bench serve."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from typer import Argument, Option

from recspec.base.machine import keep_freed_memory
from recspec.cli.console import Device, Json, Set, Verify, print_figures, print_json, print_lines
from recspec.cli.process import one_of, sizes

PROFILED_STEPS = 5


def bench_train(
    model: Annotated[str, Argument(metavar="MODEL", help="Name from `recspec models`.")],
    data: Annotated[Path | None, Option(help="Prepared dataset; by default generated data.")] = None,
    recipe: Annotated[Path | None, Option(help="Recipe: a YAML file, or the name of a published one.")] = None,
    settings: Set = None,
    steps: Annotated[int, Option(min=1, help="Measured steps.")] = 50,
    warmup: Annotated[int, Option(min=0, help="Steps before the measurement starts.")] = 5,
    profile: Annotated[bool, Option(help="Show where the time of a step goes.")] = False,
    device: Device = "auto",
    json_output: Json = False,
) -> None:
    """Measure samples/s of training, and how busy the machine is."""
    from recspec.api import keep_to_cores, settings_of
    from recspec.base import config
    from recspec.bench import bench_training
    from recspec.feature_spec import FeatureSpec
    from recspec.loading import join

    keep_freed_memory()
    model_settings, train_settings = settings_of(model, recipe, config.parse_assignments(settings or []))
    spec = FeatureSpec.load(data) if data is not None else None
    keep_to_cores(train_settings.affinity)
    with join(device) as ranks:
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
        print_json(figures)
        return
    tables = cast(Mapping[str, Any], figures.pop("profile", {}))
    print_figures(f"training {model}", figures)
    for name, title in (("parts", "parts of a step"), ("operations", "operations"), ("largest", "the largest")):
        if name in tables:
            print_lines(title, tables[name])


def bench_infer(
    paths: Annotated[list[Path], Argument(metavar="RUN|EXPORT...", help="Runs and exports to compare.")],
    batch_sizes: Annotated[str, Option(metavar="A,B", help="Rows per call.")] = "1,64,512,4096",
    threads: Annotated[str | None, Option(metavar="A,B", help="Numbers of threads; by default one per core.")] = None,
    form: Annotated[str, Option(metavar="rows|ranker", help="Form of calls to runs; an export has its own.")] = "rows",
    seconds: Annotated[float, Option(help="Seconds of each measurement.")] = 1.0,
    warmup: Annotated[int, Option(min=0, help="Calls before the measurement starts.")] = 10,
    json_output: Json = False,
    verify: Verify = True,
) -> None:
    """Measure latency and rows/s of models and exports."""
    from recspec.bench import bench_inference
    from recspec.feature_spec import FORMS

    keep_freed_memory()
    figures = bench_inference(
        paths,
        batch_sizes=sizes("--batch-sizes", batch_sizes),
        threads=sizes("--threads", threads) if threads is not None else (),
        form=one_of("--form", form, FORMS),
        seconds=seconds,
        warmup=warmup,
        verify=verify,
    )
    if json_output:
        print_json(figures)
    else:
        print_lines("answering", cast(Sequence[Mapping[str, object]], figures["measured"]))


def bench_serve(
    url: Annotated[str, Argument(metavar="URL", help="Address of a server, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, Option(help="Model name; optional if the server has one model.")] = None,
    concurrency: Annotated[str, Option(metavar="A,B", help="Numbers of concurrent clients.")] = "1,2,4,8",
    rows: Annotated[int, Option(min=1, help="Rows per request.")] = 1,
    seconds: Annotated[float, Option(help="Seconds of each measurement.")] = 5.0,
    warmup: Annotated[float, Option(min=0, help="Seconds before the measurement starts.")] = 1.0,
    token_file: Annotated[
        Path | None, Option(help="File with the bearer token; by default the variable RECSPEC_TOKEN.")
    ] = None,
    tls_ca: Annotated[
        Path | None,
        Option(help="PEM certificates to trust; by default the machine's."),
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure latency and requests/s of a running server."""
    from recspec.base import config
    from recspec.bench import Server, run_load_test

    server = Server(url, config.read_token(os.environ, token_file), tls_ca)
    clients = sizes("--concurrency", concurrency)
    figures = run_load_test(server, model=model, concurrency=clients, rows=rows, seconds=seconds, warmup=warmup)
    if json_output:
        print_json(figures)
    else:
        print_lines(f"{figures['model']} at {url}", cast(Sequence[Mapping[str, object]], figures["measured"]))
