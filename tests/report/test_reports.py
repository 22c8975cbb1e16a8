"""Reports of a run and comparisons of several: every section, hostile texts, gaps that name a command."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from typer.main import get_command

from recspec.base.errors import BundleError, DataError, SettingsError
from recspec.bundle import folder as bundle
from recspec.cli import app as cli
from recspec.evaluation import EvaluateSettings, evaluate, save
from recspec.feature_spec import FeatureSpec
from recspec.models import MODELS
from recspec.report import run_page, write_report
from recspec.report.measured import Answer, Users, pairs_of
from recspec.report.page import macro
from recspec.report.run_facts import Shown, read_runs
from recspec.report.run_page import as_set
from recspec.training import TrainSettings, train
from tests import made_up
from tests.report.conftest import hostile
from tests.report.pages import HOSTILE, Page, read


@pytest.fixture(scope="session")
def evaluated(
    runs: tuple[Path, Path], data: FeatureSpec, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Copies of the runs that keep an evaluation each."""
    folder = tmp_path_factory.mktemp("evaluated")
    asked = EvaluateSettings(ks=(3,), slices=("activity", "kind"))
    for run in runs:
        trained = bundle.load(shutil.copytree(run, folder / run.name))
        assert save(evaluate(trained, data, "test", baselines=True, settings=asked), trained, data).file
    return folder / runs[0].name, folder / runs[1].name


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps, epochs and probabilities."""
    folder = tmp_path_factory.mktemp("clicks")
    spec = made_up.clicks(folder / "data", num_rows=1500)
    settings = TrainSettings(epochs=2, tensorboard=False, batch_size=128, log_every=2)
    small = MODELS["dcnv2"].Settings(top=(4,), cross_layers=1)
    train("dcnv2", spec, folder / "run", settings=settings, model_settings=small)
    trained = bundle.load(folder / "run")
    report = evaluate(trained, spec, "test", protocols=["rows"], settings=EvaluateSettings(slices=("gender",)))
    assert save(report, trained, spec).file
    return folder / "run"


def report(*runs: Path, out: Path) -> Page:
    return read(write_report(runs, out))


def copied(
    run: Path, to: Path, record: Callable[[Any], object] = bool, evaluation: Callable[[Any], object] = bool
) -> Path:
    """A copy of a run whose record and evaluation are changed."""
    shutil.copytree(run, to)
    for file, change in ((to / "run.json", record), (next((to / "evaluations").glob("*.json")), evaluation)):
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
    return to


@pytest.fixture(scope="session")
def page_of_run(evaluated: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(evaluated[1], out=tmp_path_factory.mktemp("pages") / "report.html")


@pytest.fixture(scope="session")
def comparison(evaluated: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(*evaluated, out=tmp_path_factory.mktemp("pages") / "comparison.html")


# --- one run ---


def test_a_run_that_was_not_evaluated_names_the_command(runs: tuple[Path, Path], data: FeatureSpec) -> None:
    path = write_report([runs[0]])
    assert path == runs[0] / "report.html"
    page = read(path)
    assert "This run has not been evaluated on a test split yet" in page.shown
    assert shlex.join(["recspec", "evaluate", str(runs[0]), str(data.folder.resolve()), "--baselines"]) in page.shown
    assert bundle.load(runs[0]).card.model == "popularity", "the report is no part of the bundle"


def test_the_report_of_a_run_has_every_section(evaluated: tuple[Path, Path], page_of_run: Page) -> None:
    page = page_of_run
    assert page.inside["h2"] == [
        "Verdict",
        "Metrics beside baselines",
        "Slices",
        "Coverage and popularity",
        "Calibration",
        "Example lists",
        "Learning curves",
        "Data",
        "Plan",
        "Time and memory",
        "Make it again",
    ]
    assert page.inside["h1"] == ["Run knn & co"]
    record = read_runs([evaluated[1]])[0].data_record
    assert record is not None
    for told in (
        record.digest,
        record.path,
        "ndcg@3",
        "popularity",
        "95 % interval",
        "Density",
        "Held out, to be found",
        "Seed",
        "Latest events, the newest first",
        "recspec prepare table RAW",
        "Peak memory of the process",
        "By kind",
        "Users by how many events the model knows of them",
    ):
        assert told in page.shown, told
    users = [each for each in page.inside["bdi"] if each.startswith("u ")]
    assert len(users) == 5
    shown = {" ".join(hostile(item).split()) for item in range(24)}
    listed = {" ".join(each.split()) for each in page.inside["li"]}
    assert len(shown & listed) > 10, "titles as they are"


def test_the_report_of_a_model_with_steps_has_curves_and_calibration(clicks: Path, tmp_path: Path) -> None:
    page = report(clicks, out=tmp_path / "report.html")
    named = " ".join(page.inside["figcaption"])
    for chart in ("Loss in training", "on valid, which chose the epoch", "Probabilities and what came true"):
        assert chart in named, chart
    for told in (
        "Calibration error",
        "perfectly calibrated",
        "Samples a second",
        "By gender",
        "batch size",
        "The lists are made for the most usual context: hour ",
    ):
        assert told in page.shown, told


def test_without_its_dataset_a_run_still_has_a_report(
    evaluated: tuple[Path, Path], data: FeatureSpec, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    run = copied(evaluated[0], tmp_path / "run", lambda record: record["data"].update(path=str(gone)))
    page = report(run, out=tmp_path / "a.html")
    assert f"The dataset is no longer in {gone}; name its folder with --data." in page.shown
    assert "Acted on, among others, the most popular first" in page.shown
    assert "Hits can't be marked" in page.shown
    named = read(write_report([run], tmp_path / "b.html", data=data.folder))
    assert "Latest events, the newest first" in named.shown
    other = made_up.interactions(tmp_path / "other", num_rows=400)
    page = read(write_report([run], tmp_path / "a.html", data=other.folder))
    assert "is not the dataset that run was trained on, so nothing is taken from it" in page.shown


def test_a_damaged_log_or_evaluation_is_told_and_left_out(evaluated: tuple[Path, Path], tmp_path: Path) -> None:
    def damage(saved: Any) -> None:
        saved["report"] |= {
            "slices": 3,
            "exposure": {"model": {"shares": ["x"], "items": None}},
            "beyond_accuracy": [],
            "notes": "x",
            "verdicts": [1],
            "warnings": [{"message": HOSTILE[0]}, 3],
            "protocols": {"full": {"candidates": HOSTILE[1]}},
            "standard_errors": {"full": {"ndcg@3": "x"}},
        }

    run = copied(evaluated[0], tmp_path / "run", evaluation=damage)
    nested = "[" * 5_000
    with (run / "log.jsonl").open("a") as log:
        log.write('{"event": "epoch", "epoch": "<b>", "metrics": [1]}\n{"event": 1}\nno JSON\n' + nested + "\n3\n")
        log.write('{"event": "epoch", "epoch": 1, "metrics": {"<b>": {"<i>": "x"}}}\n')
        log.write('{"event": "step", "step": 1, "loss": NaN}\n')
        huge = "9" * 400
        for step in (2, 3):
            log.write(f'{{"event": "step", "step": {step}, "epoch": {huge}, "loss": {huge}}}\n')
        log.write(f'{{"event": "start", "parameters": {huge}}}\n{{"event": "done", "samples_per_second": {huge}}}\n')
    (run / "evaluations" / "other.json").write_text("{}")
    page = report(run, out=tmp_path / "report.html")
    assert "log.jsonl: 3 lines are damaged and left out" in page.shown
    assert "other.json" in page.shown
    assert HOSTILE[0] in page.shown


def test_an_evaluation_of_an_earlier_model_is_told_apart(evaluated: tuple[Path, Path], tmp_path: Path) -> None:
    run = copied(evaluated[0], tmp_path / "run", evaluation=lambda saved: saved["model"].update(digest="0" * 64))
    page = report(run, out=tmp_path / "report.html")
    assert "This evaluation is of an earlier model in this folder. Evaluate again:" in page.shown


# --- several runs ---


def test_a_comparison_says_which_run_is_better_and_for_whom(comparison: Page) -> None:
    page = comparison
    assert page.inside["h2"] == [
        "Verdict",
        "Differences",
        "Who gains and who loses",
        "Slices",
        "Coverage and popularity",
        "Lists side by side",
        "Curves and calibration",
        "What differs",
        "Cost and commands",
    ]
    assert any(
        f"knn & co {word} <i>popularity." in page.shown
        for word in ("is better than", "is worse than", "can't be told from")
    )
    for told in ("of the users, worse for", "events before the split", "gains with knn & co", "permutation", "✓ hit"):
        assert told in page.shown, told


def test_activity_is_shown_once_and_a_star_needs_a_clear_lead(comparison: Page, evaluated: tuple[Path, Path]) -> None:
    captions = " ".join(comparison.inside["caption"])
    assert "by the activity of users" in captions
    assert "by activity" not in captions
    assert "by kind" in captions
    knn, popular = (read_runs([run])[0] for run in (evaluated[1], evaluated[0]))
    pairs, _ = pairs_of(popular, knn)
    is_clear = pairs[0].favoured(pairs[0].main) != "neither"
    assert comparison.shown.count("★") == 1 + is_clear  # the table's title has one


def test_a_held_out_item_that_the_model_knows_is_marked_as_a_repeat() -> None:
    shown = Shown("u", "2 events", ("a",), frozenset({"x", "y"}), (("X", True), ("Y", False)))
    told = str(macro("user", shown, True, {}))
    assert told.count("a repeat, never recommended") == 1
    assert told.index("a repeat") < told.index("Y")


def test_a_run_beside_a_copy_of_itself_is_level(evaluated: tuple[Path, Path], tmp_path: Path) -> None:
    """The same run twice: no user gains or loses, and nothing is clear."""
    page = report(evaluated[0], copied(evaluated[0], tmp_path / "copy"), out=tmp_path / "comparison.html")
    assert "copy can't be told from <i>popularity." in page.shown
    assert page.shown.count("★") == 1, "only in the table's title"
    assert "copy is better for 0.0 % of the users, worse for 0.0 %, and equal for the others." in page.shown


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_no_run_is_better_if_one_was_trained_on_other_data(
    elsewhere: int, evaluated: tuple[Path, Path], tmp_path: Path
) -> None:
    def change(place: int) -> Callable[[Any], object]:
        return lambda record: record["data"].update(digest="0" * 64) if place == elsewhere else None

    copies = [copied(run, tmp_path / f"run{place}", change(place)) for place, run in enumerate(evaluated)]
    page = report(*copies, out=tmp_path / "comparison.html")
    assert f"run{elsewhere} was trained on other data than it was measured on." in page.shown
    assert not any(word in page.shown for word in ("is better than", "is worse than"))
    assert page.shown.count("★") <= 1, "only in the table's title"


def test_runs_that_were_not_evaluated_alike_name_the_commands(
    runs: tuple[Path, Path], evaluated: tuple[Path, Path], tmp_path: Path
) -> None:
    page = report(evaluated[0], runs[1], out=tmp_path / "comparison.html")
    assert "knn & co and <i>popularity can't be compared yet: knn & co has no saved evaluation." in page.shown
    assert shlex.join(["recspec", "evaluate", str(runs[1])]) in page.shown


def test_models_of_rows_are_compared_without_lists(clicks: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(clicks, tmp_path / "run"))
    page = report(clicks, copy, out=tmp_path / "comparison.html")
    assert "rows/log_loss on valid" in " ".join(page.inside["figcaption"])
    assert "can't be told from" in page.shown


# --- users who gain and lose ---


def test_users_by_hand() -> None:
    base, other = np.array([0.0, 1.0, 0.5, 0.0]), np.array([1.0, 0.0, 0.5, 1.0])
    users = Users("ndcg@10", ["a", "b", "c", "d"], np.array([1, 2, 3, 4]), base, other, "events")
    assert users.gains.tolist() == [1.0, -1.0, 0.0, 1.0]
    assert users.shares == (0.5, 0.25)
    assert users.most(3, gaining=True) == ["d", "a"], "of equal gains the user with more events first"
    assert users.most(3, gaining=False) == ["b"]
    assert users.by_activity() == {}, "too few users for ranges"
    less = Users("log_loss", ["a"], np.array([1]), np.array([0.7]), np.array([0.5]), "rows")
    assert less.gains.tolist() == pytest.approx([0.2]), "less log loss is a gain"


def test_ranges_of_activity_hold_all_users_and_their_mean_gains() -> None:
    events = np.repeat([1, 5, 9], 20)
    base, other = np.zeros(60), np.repeat([0.0, 1.0, -1.0], 20)
    ranges = Users("ndcg@10", [f"u{place}" for place in range(60)], events, base, other, "events").by_activity()
    found = [(name, len(part.ids), part.gain.value, part.gain.is_clear) for name, part in ranges.items()]
    assert found == [("1", 20, 0.0, False), ("5", 20, 1.0, True), ("9", 20, -1.0, True)]


# --- names and mistakes ---


def test_the_main_metric_is_the_usual_one() -> None:
    held = {"rows": {"log_loss": 1.0, "auc": 0.5}, "full": {"hit_rate@10": 0.1, "ndcg@10": 0.2}, "sampled": {}}
    saved: Any = SimpleNamespace(metrics=held)
    assert [Answer(saved, protocol).main for protocol in held] == ["auc", "ndcg@10", ""]


def test_runs_of_the_same_name_are_told_apart(evaluated: tuple[Path, Path], tmp_path: Path) -> None:
    copies = [copied(evaluated[0], tmp_path / each / "run") for each in ("a", "b")]
    assert [run.name for run in read_runs(copies)] == ["a/run", "b/run"]
    assert [run.name for run in read_runs([copies[0] / "bundle"])] == ["run"]


def test_mistakes_are_told(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for wanted, out, error, message in (
        ([], None, SettingsError, "report: 0 runs; give 1 to 6"),
        ([runs[0]] * 7, None, SettingsError, "report: 7 runs; give 1 to 6"),
        ([runs[0], runs[1], runs[0]], None, SettingsError, "is given twice"),
        ([runs[0]], tmp_path, SettingsError, "is a folder; give the name of a file, such as"),
        ([tmp_path / "none"], None, BundleError, "no such folder"),
        ([runs[0]], "s3://bucket/report.html", DataError, "is a URL"),
    ):
        with pytest.raises(error, match=message):
            write_report(wanted, out)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the report could not be written: .*; give another place with --out"):
        write_report([runs[0]], tmp_path / "file" / "report.html")


# --- commands ---


def test_every_command_of_a_page_is_one_that_recspec_takes(
    evaluated: tuple[Path, Path], page_of_run: Page, comparison: Page
) -> None:
    """A shell takes each line apart into the words that were meant, and the command line knows its options."""
    texts = [text for page in (page_of_run, comparison) for text in page.inside["pre code"]]
    commands = [line for text in texts for line in text.splitlines()]
    assert len(commands) >= 8
    known = get_command(cli.app)
    for line in commands:
        program, name, *words = shlex.split(line)
        assert program == "recspec"
        known.commands[name].make_context(name, words)  # type: ignore[attr-defined]
    assert any(str(evaluated[1]) in shlex.split(line) for line in commands), "a name with & and a blank is one word"


def test_a_setting_is_written_as_set_reads_it() -> None:
    for value in (None, True, 3, 0.5, "auto", "null", "7", "a: b", "[x", [64, 32], ["a", "b"], {"a": {"b": 1e-3}}):
        assert yaml.safe_load(as_set(value)) == value


def test_the_settings_that_were_taken_are_marked_and_not_those_ahead_by_chance() -> None:
    tried = [
        {"settings": {"l2": l2}, "value": value, "taken": l2 < 30} for l2, value in ((10, 0.5), (20, 0.6), (30, 0.61))
    ]
    shown = str(run_page._tried(SimpleNamespace(card=SimpleNamespace(trained={"tried": tried}))))  # type: ignore[arg-type]
    assert [row.split("</td>")[-2].rpartition(">")[2] for row in shown.split("<tr>")[-3:]] == ["", "chosen", ""]
