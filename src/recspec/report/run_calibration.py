"""Section: whether probabilities come true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from recspec.report import charts
from recspec.report.charts import Series
from recspec.report.markup import Child, coded
from recspec.report.measured import Answer, answers_of, mapping, real
from recspec.report.numbers import number, percent
from recspec.report.page import Section, details, note, num, soft, table
from recspec.report.page import charts as side_by_side
from recspec.report.run_facts import RunFacts


def calibration_section(run: RunFacts) -> Section:
    """The reliability diagram of the rows of a split."""
    return Section("calibration", "Calibration", tuple(_body(run)))


def reliability_of(run: RunFacts) -> tuple[Answer, Series] | None:
    """The bins of a reliability diagram; None without probabilities."""
    for answer in answers_of(run):
        bins = _bins(answer) if answer.protocol == "rows" else []
        if bins:
            told = [f"{number(n)} rows: probability {x:.4g}, positives {y:.4g}" for n, x, y in bins]
            return answer, Series(run.name, [x for _, x, _ in bins], [y for _, _, y in bins], told)
    return None


def _body(run: RunFacts) -> Iterator[Child]:
    found = reliability_of(run)
    if found is None:
        why = "it ranks, and its scores are no probabilities of labels in this dataset" if run.has_users else ""
        yield soft(
            f"There are no probabilities to judge{f': {why}' if why else ''}. Calibration is measured under "
            "protocol rows, on splits whose negatives were not drawn."
        )
        return
    answer, series = found
    held = mapping(answer.saved.report, "probabilities")
    yield from _judged(held)
    yield side_by_side(charts.reliability("reliability", [series], title="Probabilities and what came true"))
    rows = [[num(n), num(x), num(y), num(y - x)] for n, x, y in _bins(answer)]
    yield details("The bins as a table", table("Bins of equally many rows", ["#Rows", "#Mean probability",
                  "#Share of positives", "#Difference"], rows, named=False))  # fmt: skip


def _judged(held: Mapping[str, object]) -> Iterator[Child]:
    of = mapping(held, "calibration")
    error, chance, spread = (real(of.get(name)) for name in ("value", "by_chance", "chance_std"))
    if error is None or chance is None or spread is None:
        return
    beyond = error > chance + 3 * spread
    told = f"Calibration error {number(error)}; perfect probabilities would have {number(chance)} by chance on as "
    told += "many rows."
    if beyond:
        yield note(coded(f"The probabilities are {of.get('lean')}. {told} `recspec train --resume --set "
                   "train.calibration=temperature` mends that without changing any ranking."), kind="bad")  # fmt: skip
    else:
        yield note(f"The probabilities come true. {told}", kind="good")
    loss, constant = real(held.get("log_loss")), real(held.get("log_loss_of_constant"))
    rows, positives = real(held.get("rows")), real(held.get("positives"))
    if loss is not None and constant is not None and rows and positives is not None:
        yield soft(
            f"Log loss {number(loss)}; the rate of all rows, {percent(positives / rows)}, as every row's "
            f"probability has {number(constant)}."
        )


def _bins(answer: Answer) -> list[tuple[int, float, float]]:
    held = mapping(answer.saved.report, "probabilities", "calibration").get("bins")
    found = []
    for each in held if isinstance(held, list) else ():
        values = [real(mapping(each).get(name)) for name in ("rows", "expected", "true")]
        if None not in values:
            found.append((int(values[0] or 0), values[1] or 0.0, values[2] or 0.0))
    return found[:200]
