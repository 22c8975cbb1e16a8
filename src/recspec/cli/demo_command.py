"""The command that shows everything on made-up data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from recspec.cli.answer_commands import print_report
from recspec.cli.console import err, stages, step
from recspec.cli.data_commands import print_prepared
from recspec.cli.process import fresh_folder
from recspec.cli.recommend_commands import print_recommendation
from recspec.cli.training_commands import train

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


def demo(
    raw: Annotated[Path | None, Option(help="MovieLens files to use instead of generated ones.")] = None,
    out_folder: Annotated[Path, Option("--out", help="Folder to write.")] = Path("demo"),
    epochs: Annotated[int, Option(min=1, help="Passes over the training rows.")] = 8,
) -> None:
    """Prepare, train, evaluate and recommend in one command."""
    from recspec.base.machine import keep_freed_memory
    from recspec.bundle import folder as bundle
    from recspec.data.prepare import PrepareContext
    from recspec.datasets import DATASETS, write_movielens_like
    from recspec.evaluation import evaluate as run_evaluation
    from recspec.feature_spec import FeatureSpec
    from recspec.inference import Predictor

    keep_freed_memory()
    started = time.perf_counter()
    out_folder.mkdir(parents=True, exist_ok=True)
    if raw is None:
        raw = out_folder / "raw"
        step(f"made-up ratings in the layout of MovieLens, in {raw}")
        if not (raw / "ratings.csv").exists():
            write_movielens_like(raw, num_users=2000, num_items=1500, num_ratings=150_000, seed=0)
    movielens = DATASETS["movielens"]
    data = out_folder / "data"
    step(f"recspec prepare movielens {raw} {data}")
    with stages() as progress:
        context = PrepareContext(raw, data, engine="duckdb", memory_limit="2GB", force=True, progress=progress)
        prepared = movielens.prepare(context, movielens.Settings())
    print_prepared(prepared.summary, prepared.spec)

    run = fresh_folder(out_folder, "run")
    assignments = [*DEMO_SETTINGS, f"train.epochs={epochs}"]
    step(f"recspec train neumf {data} {run} {' '.join(f'--set {assignment}' for assignment in assignments)}")
    train("neumf", data, run, settings=assignments)

    step(f"recspec evaluate {run} {data} --baselines")
    trained = bundle.load(run)
    with stages() as progress:
        report = run_evaluation(trained, FeatureSpec.load(data), "test", baselines=True, progress=progress)
    print_report(report, "neumf")

    predictor = Predictor.open(run)
    user = predictor.busiest_user()
    step(f"recspec recommend {run} --user {user} -k 10")
    print_recommendation(predictor.recommend([user], k=10)[0], liked=predictor.liked(user, k=5))
    err.print(f"\ndone in {time.perf_counter() - started:.0f} s; all of it is in {out_folder}")
