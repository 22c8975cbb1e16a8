"""Speed of training, of answers and of servers: the commands `recspec bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from recspec.api.data import opened
from recspec.api.verb_checks import Place, keep_to_cores, merge_settings, one_of, path_or_none, settings_of, verb

PROFILED_STEPS = 5


@verb
def bench_train(
    model: str,
    *,
    data: Place | None = None,
    recipe: Place | None = None,
    steps: int = 50,
    warmup: int = 5,
    profile: bool = False,
    device: str = "auto",
    settings: Mapping[str, object] | None = None,
    **named: object,
) -> dict[str, object]:
    """Measure samples/s of training, and how busy the machine is.

    Args:
        model: Name from `recspec models`.
        data: Prepared dataset; by default generated data.
        recipe: Recipe: a YAML file, or the name of a published one.
        steps: Measured steps.
        warmup: Steps before the measurement starts.
        profile: Show where the time of a step goes.
        device: Device: auto, cpu, cuda or cuda:N.
        settings: Settings by name, such as {"dim": 64, "train.batch_size": 1024}.
        **named: Settings of the model and of training as keywords.

    Raises:
        SettingsError: for an unknown model or setting, or a model without steps.
    """
    from recspec.bench import bench_training
    from recspec.loading import join

    values = merge_settings("bench train", settings, named)
    model_settings, train_settings = settings_of(model, recipe, values)
    spec = opened(data).spec if data is not None else None
    keep_to_cores(train_settings.affinity)
    with join(device) as ranks:
        return bench_training(
            model,
            spec,
            settings=train_settings,
            model_settings=model_settings,
            ranks=ranks,
            steps=steps,
            warmup=warmup,
            profiled=PROFILED_STEPS if profile else 0,
        )


@verb
def bench_infer(
    paths: Sequence[Place],
    *,
    batch_sizes: Sequence[int] = (1, 64, 512, 4096),
    threads: Sequence[int] | None = None,
    form: Literal["rows", "ranker"] = "rows",
    seconds: float = 1.0,
    warmup: int = 10,
    verify: bool = True,
) -> dict[str, object]:
    """Measure latency and rows/s of models and exports.

    Args:
        paths: Runs and exports to compare.
        batch_sizes: Rows per call.
        threads: Numbers of threads; by default one per core.
        form: Form of calls to runs; an export has its own.
        seconds: Seconds of each measurement.
        warmup: Calls before the measurement starts.
        verify: Compare files with their manifest.

    Raises:
        BundleError: if a path holds neither a model nor an export.
    """
    from recspec.bench import bench_inference
    from recspec.feature_spec import FORMS

    return bench_inference(
        [Path(each) for each in paths],
        batch_sizes=batch_sizes,
        threads=threads or (),
        form=one_of("--form", form, FORMS),
        seconds=seconds,
        warmup=warmup,
        verify=verify,
    )


@verb
def bench_serve(
    url: str,
    *,
    model: str | None = None,
    concurrency: Sequence[int] = (1, 2, 4, 8),
    rows: int = 1,
    seconds: float = 5.0,
    warmup: float = 1.0,
    token_file: Place | None = None,
    tls_ca: Place | None = None,
) -> dict[str, object]:
    """Measure latency and requests/s of a running server.

    Args:
        url: Address of a server, such as http://127.0.0.1:8000.
        model: Model name; optional if the server has one model.
        concurrency: Numbers of concurrent clients.
        rows: Rows per request.
        seconds: Seconds of each measurement.
        warmup: Seconds before the measurement starts.
        token_file: File with the bearer token; by default the variable RECSPEC_TOKEN.
        tls_ca: PEM certificates to trust; by default the machine's.

    Raises:
        SettingsError: if no server answers, the model is unknown, or an answer reports a failure.
    """
    from recspec.base import config
    from recspec.bench import Server, run_load_test

    server = Server(url, config.read_token(os.environ, path_or_none(token_file)), path_or_none(tls_ca))
    return run_load_test(server, model=model, concurrency=concurrency, rows=rows, seconds=seconds, warmup=warmup)
