"""The report of one run, with its sections on plan, cost, data and examples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from recspec import __version__
from recspec.base.errors import RecspecError, how_many
from recspec.report.dataset_page import distributions, overview, splits_table
from recspec.report.examples import Examples, context_told, history_list, recommended_list
from recspec.report.measured import first_answer, is_lower_better, real
from recspec.report.page import (
    Child,
    Section,
    command,
    details,
    duration,
    note,
    num,
    number,
    page,
    percent,
    plain,
    size,
    soft,
    table,
    tag,
    tiles,
)
from recspec.report.run_facts import RunFacts
from recspec.report.run_sections import (
    calibration_section,
    curves_section,
    evaluate_command,
    exposure_section,
    metrics_section,
    slices_section,
    verdict_section,
)


def plan_section(run: RunFacts) -> Section:
    """What was trained, with which settings, and why."""
    return Section("plan", "Plan", tuple(_plan_body(run)))


def _plan_body(run: RunFacts) -> Iterator[Child]:
    start = run.start
    parameters = start.get("parameters")
    known = f" with {number(parameters)} parameters" if isinstance(parameters, int) else ""
    yield tag("p", "The model is ", tag("strong", run.card.model), f"{known}, trained on ", _splits(run), ".")
    choices = start.get("choices")
    if isinstance(choices, Mapping) and choices:
        rows = [[str(name).replace("_", " "), *_parted(str(told))] for name, told in choices.items()]
        yield table("Choices that recspec made, and why", ["Choice", "Value", "Reason"], rows, sorts=False)
    else:
        yield soft("There is no log.jsonl, so the reasons of the choices are not known.")
    yield _tried(run)
    yield details("All settings of the model", _settings(run.card.settings))
    if run.card.train:
        yield details("All settings of training", _settings(run.card.train))


def _tried(run: RunFacts) -> Child:
    """Settings that were tried, and which were chosen; None if none were."""
    held = run.card.trained.get("tried")
    tried = (
        [(_settings_text(each.get("settings")), real(each.get("value"))) for each in held if isinstance(each, dict)]
        if isinstance(held, list)
        else []
    )
    known = [value for _, value in tried if value is not None]
    if not known:
        return None
    lower = is_lower_better(str(run.card.trained.get("valid_metric") or ""))
    best = min(known) if lower else max(known)
    rows = [[settings, num(value), "chosen" if value == best else ""] for settings, value in tried]
    return table("Settings that were tried on valid", ["Settings", "#Value", "Chosen"], rows)


def _splits(run: RunFacts) -> str:
    splits = run.card.train.get("train_splits") or run.card.trained.get("splits")
    return " and ".join(map(str, splits)) if isinstance(splits, (list, tuple)) and splits else "train"


def _parted(told: str) -> tuple[str, str]:
    value, _, reason = told.partition(": ")
    return value, reason


def _settings_text(settings: object) -> str:
    if not isinstance(settings, Mapping):
        return ""
    return ", ".join(f"{name} {number(value)}" for name, value in settings.items()) or "defaults"


def _settings(settings: Mapping[str, object]) -> Child:
    rows = [[name, tag("code", _text(value))] for name, value in settings.items()]
    return table("Settings", ["Setting", "Value"], rows)


def _text(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 300 else f"{text[:299]}…"


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


def data_section(run: RunFacts) -> Section:
    """Name, place, digest and figures of the dataset."""
    return Section("data", "Data", tuple(_data_body(run)))


def _data_body(run: RunFacts) -> Iterator[Child]:
    record, figures = run.data_record, run.figures
    if record is not None:
        rows = [["Dataset", record.name], ["Folder", tag("code", record.path)], ["Digest", tag("code", record.digest)]]
        rows += [["Made from", _inputs(run)]] if run.preparation.get("inputs") else []
        yield table("The dataset that the model was trained on", ["", "Value"], rows, sorts=False)
    if figures is not None:
        yield from overview(figures)
        yield splits_table(figures)
        if (drawn := distributions(figures)) is not None:
            yield details("Distributions of users, items and time", drawn)
    else:
        yield from _summary(run)
    yield soft("More about the dataset, such as suspected leaks, its most frequent values and missing shares:")
    yield command(["recspec", "describe", run.data_path, "--html", "dataset.html"])


def _inputs(run: RunFacts) -> str:
    inputs = run.preparation.get("inputs")
    names = [str(each.get("name")) for each in inputs if isinstance(each, dict)] if isinstance(inputs, list) else []
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more files" if len(names) > 5 else "")


def _summary(run: RunFacts) -> Iterator[Child]:
    """What the bundle itself knows of the data."""
    for problem in run.problems:
        if "dataset" in problem or "--data" in problem:
            yield note(problem)
    summary = run.spec.metadata.get("summary")
    held = summary if isinstance(summary, dict) else {}
    shown = {
        name.replace("_", " ").capitalize(): number(value)
        for name, value in held.items()
        if isinstance(value, (int, float, str))
    }
    users, items, events = (real(held.get(name)) for name in ("users", "items", "interactions"))
    if users and items and events:
        shown["Density"] = percent(events / (users * items), 2)
    if shown:
        yield soft("As the preparation counted it:")
        yield tiles(dict(list(shown.items())[:12]))


def examples_section(run: RunFacts) -> Section:
    """Lists of five users with their histories."""
    return Section("examples", "Example lists", tuple(_examples_body(run)))


def held_out(run: RunFacts) -> str:
    """The split whose items count as hits."""
    answer = first_answer(run)
    return "test" if answer is None else answer.saved.split


def _examples_body(run: RunFacts) -> Iterator[Child]:
    if not run.has_users:
        yield soft(
            "This model scores rows and recommends no items; `recspec predict` writes a probability for each row."
        )
        return
    try:
        examples = Examples(run, held_out(run))
        users = examples.typical()
        if not users:
            yield soft("The model knows no user with an event.")
            return
        lists = examples.recommended(users)
        shown = examples.of(users)
    except RecspecError as error:
        yield note(f"No lists could be made: {error}")
        return
    told = "Five users, from few events to many; the choice is by their number of events alone."
    told += context_told(examples)
    marked = any(each.targets for each in shown)
    if marked:
        yield soft(told, f" ✓ marks an item that the user acted on in {examples.split}.")
    else:
        why = f"the items of {examples.split} are not at hand, or the model knows them"
        yield soft(told, f" Hits can't be marked: {why}.")
    for each, found in zip(shown, lists, strict=True):
        head = tag("h3", "User ", tag("bdi", plain(each.user, 80)), f", {how_many(each.num_events, 'event')}")
        parts = [history_list(each, has_order=examples.has_order), recommended_list("Recommended", found, each.targets)]
        yield tag("div", head, tag("div", *parts, class_="lists"), class_="user")


SECTIONS = (
    verdict_section,
    metrics_section,
    slices_section,
    exposure_section,
    calibration_section,
    examples_section,
    curves_section,
    data_section,
    plan_section,
    cost_section,
    reproduce_section,
)


def run_page(run: RunFacts) -> str:
    """The whole page."""
    record = run.data_record
    data = f", trained on {record.name}" if record is not None else ""
    when = run.record.started if run.record is not None else ""
    lead = tag(
        "p",
        "Model ",
        tag("strong", run.card.model),
        data,
        f", {when[:10]}" if when else "",
        ". Folder ",
        tag("code", str(run.path)),
        ".",
        class_="lead",
    )
    left_out = () if run.has_users else (exposure_section, examples_section)
    return page(f"Run {run.name}", lead, [section(run) for section in SECTIONS if section not in left_out])
