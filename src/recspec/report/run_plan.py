"""Section: the plan of a run: every choice with its reason, and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from recspec.report.markup import Child, tag
from recspec.report.measured import is_lower_better, real
from recspec.report.numbers import number
from recspec.report.page import Section, details, num, soft, table
from recspec.report.run_facts import RunFacts


def plan_section(run: RunFacts) -> Section:
    """What was trained, with which settings, and why."""
    return Section("plan", "Plan", tuple(_body(run)))


def _body(run: RunFacts) -> Iterator[Child]:
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
    tried = [(_settings_text(each.get("settings")), real(each.get("value"))) for each in held if isinstance(each, dict)
             ] if isinstance(held, list) else []  # fmt: skip
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
