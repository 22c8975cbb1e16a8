"""Training from Python: settings, plans, resuming, Ctrl-C, searches, and the bar."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recspec import api
from recspec.api import progress
from recspec.base.errors import Interrupted, RecspecError, SettingsError

TINY: dict[str, Any] = {"factors": 4, "layers": [8, 4], "batch_size": 64, "negatives": 1, "progress": False}


def test_keywords_and_settings_are_sorted_into_model_and_training(data: api.Data, tmp_path: Path) -> None:
    planned = api.train("neumf", data, tmp_path / "run", plan=True, settings={"train.epochs": 3}, **TINY)
    details = planned.to_dict()
    assert details["model_settings"]["factors"] == 4  # type: ignore[index]
    assert details["train"]["epochs"] == 3  # type: ignore[index]
    assert len(planned) > 5
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingsError, match="'factors' is given as a keyword and in settings"):
        api.train("neumf", data, tmp_path / "run", settings={"factors": 8}, **TINY)
    with pytest.raises(SettingsError, match=r"train\.epochs is 0"):
        api.train("neumf", data, tmp_path / "run", epochs=0, **TINY)


def test_a_name_that_a_fitted_model_can_only_mean_for_itself_needs_no_section(data: api.Data, tmp_path: Path) -> None:
    planned = api.train("ease", data, tmp_path / "run", plan=True, l2=77.0)
    assert planned.to_dict()["model_settings"]["l2"] == 77.0  # type: ignore[index]
    with pytest.raises(SettingsError, match=r"'l2' is a setting of settings and of train; say settings\.l2"):
        api.train("ease", data, tmp_path / "run", plan=True, settings={"settings.l2": 5.0}, l2=77.0)
    with pytest.raises(SettingsError, match=r"'l2' is a setting of settings and of train; say settings\.l2"):
        api.train("neumf", data, tmp_path / "run", plan=True, **{**TINY, "l2": 0.1})


def test_ctrl_c_writes_a_checkpoint_and_resume_goes_on(data: api.Data, tmp_path: Path) -> None:
    def interrupt(event: Mapping[str, object]) -> None:
        if event["event"] == "step":
            os.kill(os.getpid(), signal.SIGINT)

    asked = {**TINY, "epochs": 2, "log_every": 1}
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="nothing is lost: the same command with --resume continues"):
        api.train("neumf", data, tmp_path / "run", **{**asked, "progress": interrupt})
    assert signal.getsignal(signal.SIGINT) is before
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    model = api.train("neumf", data, tmp_path / "run", resume=True, **asked)
    assert model.result is not None
    assert model.result.stopped == "epochs"
    assert model.recommend("u1", k=2).shape == (2, 6)


def test_a_training_in_another_thread_leaves_signals_alone(data: api.Data, tmp_path: Path) -> None:
    reached: list[api.Model] = []
    thread = threading.Thread(
        target=lambda: reached.append(api.train("popularity", data, tmp_path / "run", progress=False))
    )
    thread.start()
    thread.join()
    assert reached[0].name == "popularity"


def test_a_search_finds_a_model_and_goes_on(data: api.Data, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    seen: list[int] = []
    space = {"settings.l2": [1, 100]}
    first = api.tune(
        "ease",
        data,
        tmp_path / "search",
        trials=1,
        space=space,
        only=True,
        progress=lambda trial, _: seen.append(trial),
    )
    assert set(seen) == {0}
    found = api.tune("ease", data, tmp_path / "search", trials=2, space=space, only=True, progress=False)
    assert len(first.found.trials) == 1
    assert len(found.found.trials) == 2
    assert found.model.recommend("u1", k=1).shape == (1, 6)
    assert found.recipe.is_file()
    assert repr(found).startswith("Search in ")
    assert "<table>" in found.to_html()


def test_the_best_of_all_models(data: api.Data, tmp_path: Path) -> None:
    told: list[str] = []
    display = SimpleNamespace(look=lambda *_: None, show=lambda *_: None, tell=told.append)
    result = api.auto(data, tmp_path / "auto", minutes=0.5, models=["popularity"], progress=display)
    assert result.model.name == "popularity"
    assert repr(result).startswith("AutoResult: ")
    assert "popularity" in result.to_html()


# --- the bar ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_is_drawn_over_itself_and_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.stages(None) as show:
        show("reading", 1, 4)
        show("reading", 4, 4)
        show("a stage of unknown length", 1, None)
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert " 25%  reading" in drawn
    assert "100%  reading" in drawn
    assert "\n" not in drawn
    assert drawn.split("\r")[-1] == ""
    assert drawn.split("\r")[-2].strip() == ""


def test_elsewhere_and_if_it_is_declined_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, asked in ((io.StringIO(), None), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.stages(asked) as show, progress.events(asked) as tell:
            show("reading", 1, 2)
            tell({"event": "step", "step": 1, "steps": 2, "epoch": 0.5, "loss": 0.7})
        assert stream.getvalue() == ""


def test_in_a_notebook_the_bar_is_a_cell_that_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    cell = SimpleNamespace(update=lambda shown: pages.append(shown._repr_html_()))
    display = SimpleNamespace(display=lambda shown, **_: pages.append(shown._repr_html_()) or cell)
    kernel = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", display)  # type: ignore[arg-type]
    with progress.events(None) as show:
        show({"event": "step", "step": 1, "steps": 4, "epoch": 0.25, "loss": 0.7})
    assert pages == ["", "<progress value='0.250' style='vertical-align:middle'></progress> epoch 0.2  loss 0.7000", ""]


def test_in_a_notebook_a_mistake_is_one_message_without_a_traceback() -> None:
    error = SettingsError("train: one message")
    assert error._render_traceback_() == ["SettingsError: train: one message"]
    assert issubclass(Interrupted, RecspecError)
