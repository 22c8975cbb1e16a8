"""Two labels in one model beside a model of each: Adult, and a made-up shop whose probabilities are known.

    python benchmarks/two_labels.py WORK [--adult FOLDER] [--seeds 3]

Adult's labels are the income and whether a person never married, without the columns `marital-status` and
`relationship`, which give the second away. In the shop, views are clicked, and clicks end in purchases; who clicks a
lot buys more, so a model of p(purchase | click) that sees clicked rows alone is wrong on the others. AUC is of test.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import recspec

LABELS = {"adult": ("income", "never_married"), "shop": ("click", "bought")}
ADULT = (
    "age workclass fnlwgt education education_num marital occupation relationship race sex capital_gain capital_loss "
    "hours country income"
).split()
LEFT_OUT = ("fnlwgt", "marital", "relationship", "income")


def write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A CSV file of rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def adult(raw: Path, given: Path) -> None:
    """Train and valid (a tenth) from adult.data, test from adult.test."""
    for name, split in (("adult.data", "train"), ("adult.test", "test")):
        lines = (line.strip().rstrip(".").split(", ") for line in (given / name).read_text().splitlines())
        people = [dict(zip(ADULT, each, strict=True)) for each in lines if len(each) == len(ADULT)]
        rows = [
            {name: value for name, value in each.items() if name not in LEFT_OUT}
            | {"income": int(each["income"] == ">50K"), "never_married": int(each["marital"] == "Never-married")}
            for each in people
        ]
        held = np.random.default_rng(1).random(len(rows)) < 0.1
        if split == "test":
            write(raw / "test.csv", rows)
            continue
        write(raw / "train.csv", [row for row, out in zip(rows, held, strict=True) if not out])
        write(raw / "valid.csv", [row for row, out in zip(rows, held, strict=True) if out])


def shop(raw: Path, rows: int = 120_000, users: int = 1_500, items: int = 300) -> None:
    """Views; test.csv has the true probabilities beside it in truth.npz."""
    rng = np.random.default_rng(7)
    who, what = rng.integers(users, size=rows), rng.integers(items, size=rows)
    taste, kind = rng.normal(size=(users, 3)), rng.normal(size=(items, 3))
    keen, price = rng.normal(size=users), rng.normal(size=items)
    affinity = (taste[who] * kind[what]).sum(1) / np.sqrt(3)
    click = 1 / (1 + np.exp(1.5 - affinity - keen[who]))
    buy = 1 / (1 + np.exp(1.0 - 0.7 * affinity - 0.8 * keen[who] + 0.7 * price[what]))
    clicked = rng.random(rows) < click
    bought = clicked & (rng.random(rows) < buy)
    made = [
        {"user": f"u{u}", "item": f"i{i}", "price": round(float(price[i]), 3), "click": int(c), "bought": int(b)}
        for u, i, c, b in zip(who, what, clicked, bought, strict=True)
    ]
    ends = {"train": (0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1)}
    for split, (start, stop) in ends.items():
        write(raw / f"{split}.csv", made[int(start * rows) : int(stop * rows)])
    first = int(0.9 * rows)
    np.savez(raw.parent / "truth.npz", click=click[first:], buy=buy[first:])


def train(name: str, data: Path, run: Path, **settings: object) -> Path:
    """A run in a process of its own."""
    given = [
        part for key, value in settings.items() for part in ("--set", f"{key.replace('__', '.')}={json.dumps(value)}")
    ]
    subprocess.run([sys.executable, "-m", "recspec", "train", name, data, run, "--force", *given], check=True)
    return run


def measured(run: Path, data: Path, labels: Sequence[str]) -> dict[str, float]:
    """AUC of test of each label."""
    return {
        label: recspec.evaluate(run, data, protocol="rows", label=label, progress=False).metrics["rows"]["auc"]
        for label in labels
    }


def main() -> None:
    """Print AUC by data set, form and seed, and the error of p(purchase | click)."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("work", type=Path)
    options.add_argument("--adult", type=Path)
    options.add_argument("--seeds", type=int, default=3)
    asked = options.parse_args()
    for name in ("shop", *(["adult"] if asked.adult else [])):
        folder = asked.work / name
        shop(folder / "raw") if name == "shop" else adult(folder / "raw", asked.adult)
        first, other = LABELS[name]
        data = folder / "data"
        recspec.prepare(folder / "raw", out=data, settings={"label": first, "other_labels": [other]}, force=True)
        labels = ("label", other)
        for seed in range(asked.seeds):
            found: dict[str, dict[str, float]] = {"own": {}}
            for label, rest in (labels, labels[::-1]):
                weights = {rest: 0.0}
                run = train(
                    "multitask",
                    data,
                    folder / f"own_{label}",
                    train__label=label,
                    label_weights=weights,
                    train__seed=seed,
                )
                found["own"] |= measured(run, data, [label])
            for form in ("shared", "mmoe", *(["esmm"] if name == "shop" else [])):
                run = train("multitask", data, folder / form, form=form, train__seed=seed)
                found[form] = measured(run, data, labels)
            print(name, "seed", seed, json.dumps(found), flush=True)
            if name == "shop":
                print("error of p(purchase | click):", json.dumps(conversion(folder, seed)), flush=True)


def conversion(folder: Path, seed: int) -> dict[str, float]:
    """Mean absolute error of p(purchase | click) over all test rows: ESMM, and a model that saw clicked rows alone."""
    truth = np.load(folder / "truth.npz")["buy"]
    both = recspec.Model(folder / "esmm").predict(folder / "raw" / "test.csv", progress=False)
    click, bought = (both.column(name).to_numpy() for name in ("probability", "probability_bought"))
    clicked = folder / "clicked"
    for split in ("train", "valid", "test"):
        with (folder / "raw" / f"{split}.csv").open() as stream:
            write(clicked / f"{split}.csv", [row for row in csv.DictReader(stream) if row["click"] == "1"])
    only = folder / "clicked_data"
    recspec.prepare(clicked, out=only, settings={"label": "bought", "context_features": []}, force=True)
    run = train("multitask", only, folder / "naive", train__seed=seed)
    naive = recspec.Model(run).predict(folder / "raw" / "test.csv", progress=False).column("probability").to_numpy()
    return {
        "esmm": float(np.abs(bought / click - truth).mean()),
        "clicked rows alone": float(np.abs(naive - truth).mean()),
    }


if __name__ == "__main__":
    main()
