"""Section: the plan of a run: every choice with its reason, and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from recspec.report.markup import Child, tag
from recspec.report.numbers import number
from recspec.report.page import Section, details, soft, table
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
    tried = [each for each in run.card.trained.get("tried", ()) if isinstance(each, dict)]  # type: ignore[attr-defined]
    if tried:
        best = max((_value(each) for each in tried), default=0.0)
        rows = [[_settings_text(each.get("settings")), number(each.get("value")), "chosen" if _value(each) == best else ""]
                for each in tried]  # fmt: skip
        yield table("Settings that were tried on valid", ["Settings", "#Value", ""], rows)
    yield details("All settings of the model", _settings(run.card.settings))
    if run.card.train:
        yield details("All settings of training", _settings(run.card.train))


def _splits(run: RunFacts) -> str:
    splits = run.card.train.get("train_splits") or run.card.trained.get("splits")
    return " and ".join(map(str, splits)) if isinstance(splits, (list, tuple)) and splits else "train"


def _parted(told: str) -> tuple[str, str]:
    value, _, reason = told.partition(": ")
    return value, reason


def _value(tried: Mapping[str, object]) -> float:
    value = tried.get("value")
    return float(value) if isinstance(value, (int, float)) else float("-inf")


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
