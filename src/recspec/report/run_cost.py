"""Sections: time and memory, and how to make the same run again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from recspec import __version__
from recspec.report.markup import Child, tag
from recspec.report.measured import real
from recspec.report.numbers import duration, number, size
from recspec.report.page import Section, command, soft, table
from recspec.report.run_facts import RunFacts
from recspec.report.run_metrics import evaluate_command


def cost_section(run: RunFacts) -> Section:
    """Seconds, memory and the machine."""
    return Section("cost", "Time and memory", tuple(_cost(run)))


def reproduce_section(run: RunFacts) -> Section:
    """Commands, versions and the seed."""
    return Section("reproduce", "Make it again", tuple(_reproduce(run)))


def train_command(run: RunFacts) -> list[str]:
    """The command that made the run, as it was typed, or as its settings say."""
    if run.record is not None and run.record.command:
        return [*run.record.command]
    settings = [word for name, value in run.card.settings.items() for word in ("--set", f"{name}={as_set(value)}")]
    return ["recspec", "train", run.card.model, run.data_path, str(run.path), *settings]


def _cost(run: RunFacts) -> Iterator[Child]:
    trained, record = run.card.trained, run.record
    rows: list[list[Child]] = [["Training", duration(trained.get("seconds"))]]
    if record is not None and record.seconds is not None:
        rows.append(["Whole command", duration(record.seconds)])
    if evaluating := sum(real(each.get("evaluation_seconds")) or 0.0 for each in run.of("epoch")):
        rows.append(["Validation within it", duration(evaluating)])
    if epochs := len([*run.of("epoch")]):
        rows.append(
            ["Epochs", f"{epochs}, the kept one is {number(trained.get('epoch'))}; stopped: {trained.get('stopped')}"]
        )
    if speed := real(run.done.get("samples_per_second")):
        rows.append(["Samples a second", number(round(speed))])
    if record is not None and record.peak_memory:
        rows.append(["Peak memory of the process", size(record.peak_memory)])
    for name in ("peak_device_memory", "device_memory"):
        if (held := real(run.done.get(name))) is not None:
            rows.append(["Peak memory of the device", size(held)])
    for saved in run.evaluations[:5]:
        if saved.seconds is not None:
            rows.append(
                [
                    f"Evaluation on {saved.split}{', with baselines' if saved.baseline_metrics else ''}",
                    duration(saved.seconds),
                ]
            )
    rows.append(["Model on disk", size(sum(file.stat().st_size for file in run.bundle.rglob("*") if file.is_file()))])
    rows.append(["Device", f"{trained.get('device', '–')}, {number(trained.get('world_size', 1))} process(es)"])
    for name, value in (record.machine if record is not None else {}).items():
        rows.append([f"Machine: {name.replace('_', ' ')}", size(value) if "memory" in name else number(value)])
    yield table("What the run took, and where it ran", ["", "Value"], rows, sorts=False)


def _reproduce(run: RunFacts) -> Iterator[Child]:
    record, trained = run.record, run.card.trained
    if prepare := _prepare_command(run):
        yield tag("h3", "Prepare the data")
        yield command(prepare)
    yield tag("h3", "Train")
    yield command(train_command(run))
    if record is not None and record.command and record.directory:
        yield soft("Run in the folder ", tag("code", record.directory), ".")
    if record is None or not record.command:
        yield soft(
            "The command was not noted; this one has the same settings of the model. Those of training stand under "
            "Plan."
        )
    if record is not None and record.made_of:
        yield soft("Made of the runs ", [(tag("code", each), " ") for each in record.made_of], ".")
    yield tag("h3", "Evaluate and report")
    yield command(evaluate_command(run), ["recspec", "report", run.path])
    machine = record.machine if record is not None else {}
    versions: list[tuple[str, object]] = [("recspec", run.card.recspec), ("torch", trained.get("torch", "–"))]
    versions += [("Python", machine.get("python", "–")), ("Seed", run.card.train.get("seed", "–"))]
    if run.card.recspec != __version__:
        versions.append(("recspec of this report", __version__))
    if record is not None:
        versions.append(("Started", record.started))
    yield table("Versions and seed", ["", "Value"], [[name, str(value)] for name, value in versions], sorts=False)
    yield soft(
        "The same seed, data and versions on the same kind of machine give the same model, up to the rounding of "
        "parallel sums."
    )


def _prepare_command(run: RunFacts) -> list[str]:
    """The preparation with the settings that are not the defaults; empty if they are not known."""
    dataset, settings = run.preparation.get("dataset"), run.preparation.get("settings")
    if not isinstance(dataset, str) or not isinstance(settings, Mapping):
        return []
    from recspec.datasets import DATASETS

    if dataset not in DATASETS:
        return []
    defaults: Mapping[str, Any] = DATASETS[dataset].Settings.model_construct().model_dump(mode="json")
    changed = [name for name, value in settings.items() if name in defaults and defaults[name] != value]
    given = [word for name in changed for word in ("--set", f"{name}={as_set(settings[name])}")]
    return ["recspec", "prepare", dataset, "RAW", run.data_path, *given]


def as_set(value: object) -> str:
    """A value as `--set` reads it: YAML, in which a plain text needs no quotes."""
    try:
        is_plain = isinstance(value, str) and yaml.safe_load(value) == value
    except yaml.YAMLError:
        is_plain = False
    return str(value) if is_plain else json.dumps(value)
