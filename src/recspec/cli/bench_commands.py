"""Commands that measure: bench train, bench infer, bench serve."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from recspec.cli.console import print_figures, print_json, print_lines
from recspec.cli.options import Device, Json, Set, Verify
from recspec.cli.process import keep_to_cores, one_of, settings_of, sizes
from recspec.spec import FeatureSpec


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
    """Measure training speed: samples/s, and shares of the machine's matrix rate and memory bandwidth."""
    from recspec.bench import bench_training
    from recspec.distributed import join
    from recspec.machine import keep_freed_memory

    keep_freed_memory()
    model_settings, train_settings = settings_of(model, recipe, settings or [], amp=amp)
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


PROFILED_STEPS = 5


def bench_infer(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN|EXPORT...", help="runs and exports, side by side")],
    batch_sizes: Annotated[str, typer.Option(metavar="A,B", help="rows of a call")] = "1,64,512,4096",
    threads: Annotated[
        str | None, typer.Option(metavar="A,B", help="Numbers of threads; by default one per core.")
    ] = None,
    form: Annotated[str, typer.Option(metavar="rows|ranker", help="of runs; an export has its own")] = "rows",
    seconds: Annotated[float, typer.Option(help="Seconds of measurement for each table row.")] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="calls before the clock starts")] = 10,
    json_output: Json = False,
    verify: Verify = True,
) -> None:
    """Measure latency (p50 to p99) and rows/s of models and their exports, by batch size."""
    from recspec.bench import bench_inference
    from recspec.machine import keep_freed_memory
    from recspec.spec import FORMS

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
    url: Annotated[str, typer.Argument(help="of a running server, such as http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="Model name; optional if the server has one model.")] = None,
    concurrency: Annotated[str, typer.Option(metavar="A,B", help="clients that ask at once")] = "1,2,4,8",
    rows: Annotated[int, typer.Option(min=1, help="of a request")] = 1,
    seconds: Annotated[float, typer.Option(help="Seconds of measurement for each table row.")] = 5.0,
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
    """Measure latency (p50 to p99) and requests/s of a running server, by number of clients."""
    from recspec.bench import Server, run_load_test
    from recspec.serving import read_token

    figures = run_load_test(
        Server(url, read_token(os.environ, token_file), tls_ca),
        model=model,
        concurrency=sizes("--concurrency", concurrency),
        rows=rows,
        seconds=seconds,
        warmup=warmup,
    )
    if json_output:
        print_json(figures)
    else:
        print_lines(f"{figures['model']} at {url}", cast(Sequence[Mapping[str, object]], figures["measured"]))
