"""Default settings of click models on labelled data that nobody tuned for, beside peers' settings, on the same rows.

    python benchmarks/stress/defaults_clicks.py prepare --raw FOLDER
    python benchmarks/stress/defaults_clicks.py trace --models dlrm --variants '{"peer": {"train.batch_size": 1024}}'
    python benchmarks/stress/defaults_clicks.py baselines
    python benchmarks/stress/defaults_clicks.py trace --propose --variants '{"new": {}}'
    python benchmarks/stress/defaults_clicks.py table --labels new old peer

`prepare` makes prepared datasets from the public files in FOLDER (those that are there) and from made-up rows whose
best possible score is known. `trace` trains without early stopping and records AUC and log loss of valid and test
after every epoch; valid selects the epoch, test only reports. `baselines` fits the constant, logistic regression and,
if it is installed, LightGBM. `table` compares, with differences in standard errors of a bootstrap over test rows.

Every result is a line of results/defaults_clicks.jsonl, so nothing runs twice; logits of test lie beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recspec.data.prepare import PrepareContext
from recspec.datasets import DATASETS
from recspec.feature_spec import FeatureSpec
from recspec.metrics import measures as metrics

Found = dict[str, Any]
Floats = NDArray[Any]

RESULTS = Path("results")
PATIENCE = 5
"""Epochs without a better AUC or log loss on valid after which a trace ends."""


# --- data ------------------------------------------------------------------------------------------------------------

MOVIES = {"user": "user", "item": "movie", "timestamp": None, "label": "rating", "positive_from": 4}
REVIEWS = {"user": "reviewerID", "item": "asin", "timestamp": None, "label": "overall", "positive_from": 5}
NOBODY = {"user": None, "item": None, "timestamp": None, "label": "label"}
SHARES = {"valid": 0.1, "test": 0.2}
CRITEO_NUMBERS, CRITEO_IDS = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]


def adult(raw: Path, share: float) -> tuple[pa.Table, Mapping[str, Any]]:
    """Who earns over 50,000 dollars a year."""
    names = [
        "age",
        "workclass",
        "fnlwgt",
        "education",
        "education_num",
        "marital_status",
        "occupation",
        "relationship",
        "race",
        "gender",
        "capital_gain",
        "capital_loss",
        "hours_per_week",
        "native_country",
        "income",
    ]
    lines = [
        line.rstrip(".").split(", ")
        for name in ("adult.data", "adult.test")
        for line in (raw / "adult" / name).read_text().splitlines()
        if line.count(",") == 14
    ]
    kept = lines[:: round(1 / share)]
    columns = dict(zip(names, zip(*kept, strict=True), strict=True))
    table = pa.table({**columns, "label": [int(">50K" in value) for value in columns.pop("income")]})
    numeric = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")
    used = tuple(name for name in columns if name != "fnlwgt")
    return table, {**NOBODY, "context_features": used, "numeric": numeric}


def criteo_ids(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """The categorical features of the first 40,000 of Criteo's rows."""
    file = raw / "criteo-kaggle" / "train_first80k.tsv"
    rows = [line.rstrip("\n").split("\t") for line in file.read_text().splitlines()[:40_000]]
    columns = dict(zip(["label", *CRITEO_NUMBERS, *CRITEO_IDS], zip(*rows, strict=True), strict=True))
    table = pa.table(
        {"label": [int(each) for each in columns["label"]], **{name: columns[name] for name in CRITEO_IDS}}
    )
    return table, {**NOBODY, "context_features": CRITEO_IDS, "categorical": CRITEO_IDS, "min_count": 2}


def outbrain(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """Displays of Outbrain's recommendations, of which one is clicked."""
    rows = pa.csv.read_csv(raw / "outbrain" / "clicks_events_first1959displays.csv")
    rows = rows.append_column("hour", pa.array([str(each)[11:13] for each in rows["timestamp_view"].to_pylist()]))
    ids = ("ad_id", "document_id", "platform", "geo_location", "hour")
    rows = pa.table(
        {name: rows[name].cast(pa.string()) for name in (*ids, "display_id")} | {"clicked": rows["clicked"]}
    )
    more = {"label": "clicked", "group": "display_id", "split": "group", "context_features": ids, "categorical": ids}
    return rows, {**NOBODY, **more}


def outbrain_ads(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """A single feature: the ad."""
    rows = pa.csv.read_csv(raw / "outbrain" / "clicks_train_sample_19943displays.csv")
    more = {"label": "clicked", "group": "display_id", "split": "group"}
    return rows, {**NOBODY, **more, "context_features": ("ad_id",), "categorical": ("ad_id",)}


def movielens_1m(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """Ratings of every eighth user of MovieLens 1M."""
    at = raw / "movielens-1m"
    rows = [line.split("::") for line in (at / "ratings.dat").read_text().splitlines()]
    people = {each[0]: each for each in (line.split("::") for line in (at / "users.dat").read_text().splitlines())}
    films = {
        each[0]: each
        for each in (line.split("::") for line in (at / "movies.dat").read_text(encoding="latin-1").splitlines())
    }
    rows = [each for each in rows if int(each[0]) % 8 == 0]
    features = {name: [people[each[0]][at] for each in rows] for at, name in ((1, "gender"), (2, "age"), (3, "job"))}
    table = pa.table(
        {
            "user": [each[0] for each in rows],
            "movie": [each[1] for each in rows],
            **features,
            "genres": [films[each[1]][2] for each in rows],
            "rating": [float(each[2]) for each in rows],
        }
    )
    more = {"user_features": tuple(features), "item_features": ("genres",), "lists": ("genres",)}
    return table, {**MOVIES, **more, "categorical": tuple(features)}


def movielens_small(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """Ratings of MovieLens latest-small."""
    at = raw / "movielens-latest-small"
    rows, films = pa.csv.read_csv(at / "ratings.csv"), pa.csv.read_csv(at / "movies.csv").to_pydict()
    genres = dict(zip(films["movieId"], films["genres"], strict=True))
    movie = rows["movieId"].to_pylist()
    table = pa.table(
        {
            "user": rows["userId"],
            "movie": rows["movieId"],
            "rating": rows["rating"],
            "genres": [genres[each] for each in movie],
        }
    )
    return table, {**MOVIES, "item_features": ("genres",), "lists": ("genres",)}


def movielens_100k(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """Ratings of MovieLens 100K with features of the users."""
    at = raw / "movielens-100k"
    rows = [line.split("\t") for line in (at / "u.data").read_text().splitlines()]
    people = {each[0]: each for each in (line.split("|") for line in (at / "u.user").read_text().splitlines())}
    features = {name: [people[each[0]][at] for each in rows] for at, name in ((1, "age"), (2, "gender"), (3, "job"))}
    table = pa.table(
        {
            "user": [each[0] for each in rows],
            "movie": [each[1] for each in rows],
            "rating": [float(each[2]) for each in rows],
            **features,
        }
    )
    more = {"user_features": tuple(features), "numeric": ("age",), "categorical": ("gender", "job")}
    return table, {**MOVIES, **more}


def music(raw: Path) -> tuple[pa.Table, Mapping[str, Any]]:
    """Amazon's reviews of musical instruments: who gives five stars."""
    file = raw / "amazon-musical-instruments" / "Musical_Instruments_5.json"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return pa.table({name: [row[name] for row in rows] for name in ("reviewerID", "asin", "overall")}), REVIEWS


def made_up(
    num_rows: int, sizes: Sequence[int], *, pairs: int, main: float, cross: float, seed: int, skew: float = 0.7
) -> tuple[pa.Table, Mapping[str, Any]]:
    """Categorical features of these cardinalities; their own effects and products of some pairs make the logit."""
    rng = np.random.default_rng(seed)
    ids, logit = {}, np.full(num_rows, -1.0)
    for number, size in enumerate(sizes):
        weight = (np.arange(size) + 3.0) ** -skew
        ids[f"f{number}"] = rng.choice(size, num_rows, p=weight / weight.sum())
        logit += rng.normal(0, main, size)[ids[f"f{number}"]]
    for number in range(pairs):
        one, other = rng.choice(len(sizes), 2, replace=False)
        ours, theirs = (rng.normal(0, cross**0.5 / 4**0.25, (sizes[at], 4)) for at in (one, other))
        logit += (ours[ids[f"f{one}"]] * theirs[ids[f"f{other}"]]).sum(1)
        del number
    probability = 1 / (1 + np.exp(-logit))
    label = (rng.random(num_rows) < probability).astype(np.int64)
    names = tuple(ids)
    return pa.table({**ids, "label": label}), {**NOBODY, "context_features": names, "categorical": names}


TEN = (7, 20, 50, 100, 200, 500, 1000, 2000, 3000, 5000)
SMALL_TEN = (10, 15, 20, 30, 40, 50, 60, 80, 100, 200)
TABLES: Mapping[str, Callable[[Path], tuple[pa.Table, Mapping[str, Any]]]] = {
    "adult": lambda raw: adult(raw, 1),
    "adult_tenth": lambda raw: adult(raw, 0.1),
    "criteo_ids": criteo_ids,
    "outbrain": outbrain,
    "outbrain_ads": outbrain_ads,
    "ml_1m": movielens_1m,
    "ml_small": movielens_small,
    "ml_100k": movielens_100k,
    "music": music,
    "ten_ids": lambda _: made_up(200_000, TEN, pairs=8, main=0.5, cross=0.7, seed=1),
    "ten_pairs": lambda _: made_up(80_000, SMALL_TEN, pairs=10, main=0.2, cross=1.5, seed=4),
    "ten_sparse": lambda _: made_up(30_000, TEN, pairs=8, main=0.5, cross=0.7, seed=2),
    "rare_ids": lambda _: made_up(30_000, (10, 15_000, 15_000, 30), pairs=2, main=0.6, cross=0.5, seed=3, skew=0.2),
}
MADE: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "criteo": ("criteo", "criteo-kaggle/train_first80k.tsv", {"rows": [50_000, 10_000, 20_000], "min_count": 2}),
    "criteo_10k": ("criteo", "criteo-kaggle/train_first80k.tsv", {"rows": [7_000, 2_000, 10_000], "min_count": 2}),
    "dense": ("synthetic", ".", {"num_rows": 30_000}),
    "sparse": ("synthetic", ".", {"num_users": 8_000, "num_items": 6_000, "num_rows": 20_000}),
    "tiny": ("synthetic", ".", {"num_users": 200, "num_items": 100, "num_rows": 2_000}),
}
SETS = (*TABLES, *MADE)


def prepare(raw: Path, data: Path) -> None:
    """Write every dataset whose files are there."""
    for name in SETS:
        if (data / name).exists():
            continue
        kind = "table"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.parquet"
            try:
                if name in TABLES:
                    table, given = TABLES[name](raw)
                    pq.write_table(table, file)
                    settings: Mapping[str, Any] = {**SHARES, **given}
                else:
                    kind, place, settings = MADE[name]
                    file = raw / place
            except FileNotFoundError as error:
                print(f"{name}: left out, {error}")
                continue
            dataset = DATASETS[kind]
            made = dataset.prepare(PrepareContext(file, data / name), dataset.Settings.model_validate(settings))
            print(name, made.message)


# --- training --------------------------------------------------------------------------------------------------------


def trace(
    spec: FeatureSpec, model: str, settings: Mapping[str, Any], epochs: int, seconds: float, propose: bool = False
) -> Found:
    """Valid and test after every epoch of a training run without early stopping; logits of test of the best epochs.

    With `propose`, settings that are not among `settings` are those that the model's own rules propose.
    """
    from recspec.evaluation.scoring import score_rows
    from recspec.loading import Ranks
    from recspec.models import MODELS
    from recspec.training.loop import TrainingRun
    from recspec.training.plan import make_plan
    from recspec.training.product_rates import arithmetic
    from recspec.training.settings import TrainSettings

    train = {name.removeprefix("train."): value for name, value in settings.items() if name.startswith("train.")}
    own = {name: value for name, value in settings.items() if not name.startswith("train.")}
    truth = {split: labels_of(spec, split) for split in ("valid", "test")}
    asked = TrainSettings.model_validate({"tensorboard": False, "epochs": epochs, **train})
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(model, spec, asked, MODELS[model].Settings.model_validate(own), Ranks(), propose=propose)
        run = TrainingRun(plan, Path(folder) / "run", Ranks())
        rows, kept, started = [], dict[str, Any](), time.process_time()
        with arithmetic(plan.precision.value, False):
            for epoch in range(1, epochs + 1):
                losses = [(float(loss), run.progress.batch) for loss in run.epoch()]
                run.progress.epoch, run.progress.batch = epoch, 0
                with run._averaged():
                    logits = {split: score_rows(run.model, spec, split) for split in truth}
                row = {
                    "epoch": epoch,
                    "train_loss": float(np.mean([loss for loss, _ in losses])),
                    "seconds": time.process_time() - started,
                }
                for split, labels in truth.items():
                    row[f"{split}_auc"] = metrics.auc(logits[split], labels)
                    row[f"{split}_log_loss"] = metrics.log_loss(logits[split], labels)
                rows.append(row)
                best = {
                    "auc": max(rows, key=lambda each: each["valid_auc"])["epoch"],
                    "log_loss": min(rows, key=lambda each: each["valid_log_loss"])["epoch"],
                }
                kept |= {name: logits["test"] for name, at in best.items() if at == epoch}
                if epoch - max(best.values()) >= PATIENCE or row["seconds"] > seconds:
                    break
    return {
        "batch_size": plan.batch_size.value,
        "precision": plan.precision.value,
        "best": best,
        "trace": rows,
        "parameters": run.model.num_parameters(),
        "logits": kept,
    }


def labels_of(spec: FeatureSpec, split: str) -> Floats:
    """The labels of a split."""
    from recspec.data.storage import open_split

    column = open_split(spec, split, [spec.label]).read(0, 2**62)[spec.label]
    return np.asarray(column, np.float32) > 0


# --- baselines -------------------------------------------------------------------------------------------------------


def baselines(spec: FeatureSpec) -> Iterator[tuple[str, Floats]]:
    """Test logits of the constant, of logistic regression and of LightGBM."""
    from recspec.evaluation.evaluations import ROW_BASELINES
    from recspec.evaluation.row_baselines import row_blocks

    for name, fit in ROW_BASELINES.items():
        scorer = fit(spec, ("train",))
        parts = [scorer.logits(block) for _, block in row_blocks(spec, ("test",), scorer.features)]
        yield name, np.concatenate(parts)
    try:
        yield "lightgbm", of_trees(spec)
    except ImportError as error:
        print(f"LightGBM is left out: {error}")


def of_trees(spec: FeatureSpec) -> Floats:
    """Test logits of LightGBM: its usual settings, categories as such, rounds until valid stops improving."""
    import lightgbm

    from recspec.data.storage import Ragged, open_split

    sets, names = {}, list(spec.inputs())
    for split in ("train", "valid", "test"):
        columns = open_split(spec, split, names).read(0, 2**62)
        parts, categorical = [], list[int]()
        for name in names:
            column, ids = columns[name], name in spec.inputs(categorical=True)
            if isinstance(column, Ragged):
                padded = np.asarray(column.pad(spec.features[name].length or 1))
                parts += [(padded == each).any(1) for each in range(1, min(spec.num_ids(name), 64))]
                continue
            categorical += [len(parts)] if ids else []
            parts.append(np.asarray(column))
        sets[split] = np.stack([np.asarray(part, np.float64) for part in parts], axis=1)
    data = lightgbm.Dataset(sets["train"], labels_of(spec, "train"), categorical_feature=categorical)
    valid = lightgbm.Dataset(sets["valid"], labels_of(spec, "valid"), reference=data)
    how = {"objective": "binary", "learning_rate": 0.05, "num_leaves": 31, "verbosity": -1, "num_threads": 1, "seed": 0}
    stop = lightgbm.early_stopping(50, verbose=False)
    made = lightgbm.train(how, data, 1000, valid_sets=[valid], callbacks=[stop])
    return np.asarray(made.predict(sets["test"], raw_score=True))


# --- results ---------------------------------------------------------------------------------------------------------


class Results:
    """Lines of results, each known by what was asked."""

    def __init__(self, folder: Path) -> None:
        self.file, self.logits = folder / "defaults_clicks.jsonl", folder / "logits"
        self.logits.mkdir(parents=True, exist_ok=True)
        self.lines = [json.loads(line) for line in self.file.open()] if self.file.exists() else []
        self.known = {line["key"] for line in self.lines}

    def add(self, asked: Found, find: Callable[[], Found]) -> None:
        """Find and write a result, unless it is there."""
        key = hashlib.sha256(json.dumps({k: v for k, v in asked.items() if k != "label"}, sort_keys=True).encode())
        if (digest := key.hexdigest()[:16]) in self.known:
            return
        found = find()
        np.savez_compressed(self.logits / f"{digest}.npz", **found.pop("logits"))
        line = {"key": digest, **asked, **found}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.known.add(digest)
        self.lines.append(line)
        if "trace" in line:
            at = line["trace"][line["best"]["log_loss"] - 1]
            print(
                f"{asked['set']:12} {asked['model']:9} {asked['label']:12} "
                f"epoch {at['epoch']:2} of {len(line['trace']):2}, "
                f"valid {at['valid_log_loss']:.4f} {at['valid_auc']:.4f}, {line['trace'][-1]['seconds']:.0f} s",
                flush=True,
            )

    def find(self, name: str, model: str, label: str) -> Found | None:
        """The newest result of that name."""
        wanted = (name, model, label)
        found = [line for line in self.lines if (line["set"], line["model"], line["label"]) == wanted]
        return found[-1] if found else None

    def scores(self, line: Found) -> Floats:
        """Test logits of the epoch with the least log loss on valid."""
        with np.load(self.logits / f"{line['key']}.npz") as held:
            return np.asarray(held["log_loss"], np.float64)


def show_table(data: Path, results: Results, labels: Sequence[str], models: Sequence[str]) -> None:
    """Test log loss and AUC of each label, and how far the first one is from the others in standard errors."""
    for model in models:
        beside = [*labels, "logistic_regression", "lightgbm", "constant"]
        print(f"\n| {model} | " + " | ".join(beside) + " |\n|" + "---|" * (len(beside) + 1))
        for name in SETS:
            held = [results.find(name, model if label in labels else label, label) for label in beside]
            if held[0] is None:
                continue
            truth, first = labels_of(FeatureSpec.load(data / name), "test"), results.scores(held[0])
            cells = []
            for line in held:
                logits = None if line is None else results.scores(line)
                cells.append("" if logits is None else cell(first, logits, truth, other=line is not held[0]))
            print(f"| {name} | " + " | ".join(cells) + " |")


def cell(first: Floats, logits: Floats, truth: Floats, *, other: bool) -> str:
    """Log loss and AUC; of another contender also the first one's lead in standard errors of the paired difference."""
    text = f"{metrics.log_loss(logits, truth):.4f} {metrics.auc(logits, truth):.4f}"
    if not other:
        return text
    signs = np.where(truth, 1.0, -1.0)
    lead = np.logaddexp(0, -signs * logits) - np.logaddexp(0, -signs * first)
    in_errors = float(lead.mean()) / max(1e-12, float(lead.std()) / math.sqrt(len(lead)))
    rng, differences = np.random.default_rng(0), []
    for _ in range(200):
        rows = rng.integers(0, len(truth), len(truth))
        differences.append(metrics.auc(first[rows], truth[rows]) - metrics.auc(logits[rows], truth[rows]))
    by_area = (metrics.auc(first, truth) - metrics.auc(logits, truth)) / max(1e-12, float(np.nanstd(differences)))
    return f"{text} ({in_errors:+.1f}, {by_area:+.1f})"


def main() -> None:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("prepare", "trace", "baselines", "table"))
    parser.add_argument("--raw", type=Path, default=Path("raw"))
    parser.add_argument("--data", type=Path, default=RESULTS / "defaults_clicks_data")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--sets", nargs="*", default=list(SETS))
    parser.add_argument("--models", nargs="*", default=["dlrm", "dcnv2", "wide_deep"])
    parser.add_argument("--variants", type=json.loads, default={"asked": {}}, help="{label: {setting: value}}")
    parser.add_argument("--propose", action="store_true", help="fill in what the models' own rules propose")
    parser.add_argument("--labels", nargs="*", default=["new", "old", "peer"])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=45)
    asked = parser.parse_args()
    if asked.verb == "prepare":
        prepare(asked.raw, asked.data)
        return
    results = Results(asked.results)
    if asked.verb == "table":
        show_table(asked.data, results, asked.labels, asked.models)
        return
    for name in asked.sets:
        spec = FeatureSpec.load(asked.data / name)
        if asked.verb == "baselines":
            for baseline, logits in baselines(spec):
                labels = labels_of(spec, "test")
                found = {"test_auc": metrics.auc(logits, labels), "test_log_loss": metrics.log_loss(logits, labels)}
                what: Found = {"set": name, "model": baseline, "label": baseline, "settings": {}}
                results.add(what, partial(dict, **found, logits={"log_loss": logits}))
                print(name, baseline, found, flush=True)
            continue
        for model, (label, given) in product(asked.models, asked.variants.items()):
            what = {"set": name, "model": model, "label": label, "settings": given, "propose": asked.propose}
            results.add(what, partial(trace, spec, model, given, asked.epochs, asked.seconds, asked.propose))


if __name__ == "__main__":
    main()
