"""Models of installed packages: found by their entry points, used by the commands like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recspec.base.errors import SettingsError
from recspec.models import MODELS, all_models, find_model, known_models
from tests import made_up
from tests.processes import COMMAND, ended

SOURCE = '''
"""A factorisation machine: Rendle, Factorization Machines, ICDM 2010, equation 1."""

from pydantic import Field

from recspec.base import config
from recspec.models import Model
from recspec.models.layers import Embeddings


class FmSettings(config.Settings):
    """The size of the vectors."""

    dim: int = Field(4, ge=1, description="width of every vector")


class Fm(Model):
    """A factorisation machine over ids."""

    name, Settings, needs = "pairs", FmSettings, ("user", "item", "label")

    def __init__(self, spec, settings, table_rows=None):
        super().__init__(spec, settings, table_rows)
        self.ids = tuple(name for name in spec.inputs() if spec.features[name].is_categorical)
        self.vectors = Embeddings(spec, dict.fromkeys(self.ids, settings.dim), table_rows=table_rows)
        self.weights = Embeddings(spec, dict.fromkeys(self.ids, 1), table_rows=table_rows)

    def features(self):
        return self.ids

    def forward(self, batch):
        vectors = self.vectors(batch).view(-1, len(self.ids), self.settings.dim)
        # Equation 1's sum over pairs by its lemma 3.1: half the square of the sum less the sum of the squares.
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        return self.weights(batch).sum(1) + pairs
'''

COMMANDS = """
import sys
from recspec import cli
sys.path.insert(0, sys.argv[1])
for line in sys.argv[2:]:
    sys.argv = ["recspec", *line.split()]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
"""


def install(folder: Path, package: str, source: str, *entries: str) -> Path:
    """A package as pip lays it out, with entry points `name = module:attribute`."""
    (info := folder / f"{package}-1.0.dist-info").mkdir(parents=True)
    (folder / f"{package}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[recspec.models]", *entries, ""]))
    return folder


def test_the_commands_train_evaluate_and_export_a_model_of_an_installed_package(tmp_path: Path) -> None:
    install(tmp_path, "of_others", SOURCE, "pairs = of_others:Fm")
    data, run = made_up.interactions(tmp_path / "data", num_users=60, num_items=30).folder, tmp_path / "run"
    lines = [
        f"train pairs {data} {run} --set dim=2 --set train.epochs=1 --set train.tensorboard=false",
        f"evaluate {run} {data}",
        f"export {run} {tmp_path / 'exported'} --batch-sizes 1",
        "models",
    ]
    done = ended(COMMANDS, str(tmp_path), *lines)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "exported" / "export.json").is_file()
    assert "A factorisation machine over ids." in done.stdout
    elsewhere = ended(COMMAND, "evaluate", str(run), str(data))
    assert elsewhere.returncode == 2
    assert "unknown model 'pairs'" in elsewhere.stderr
    assert "a model of your own needs its package here" in " ".join(elsewhere.stderr.split())


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "import no_such_library\n",
            r"ModuleNotFoundError: No module named 'no_such_library'; `python -c 'import odd'`",
        ),
        ("raise OSError('no licence')\n", "OSError: no licence; .* shows where; repair or uninstall the package"),
        ("Other = 1\n", "AttributeError: module 'odd' has no attribute 'Fm'"),
        ("class Fm: name = 'pairs'\n", "odd:Fm is <class 'odd.Fm'>; expected a complete subclass of Model"),
        (
            "from recspec.models import Model\nclass Fm(Model): name = 'pairs'\n",
            "expected a complete subclass of Model",
        ),
        (SOURCE.replace('"pairs", FmS', '"other", FmS'), "the class's name is 'other'; give both the same name"),
    ],
)
def test_a_package_that_gives_no_model_is_one_clear_error(
    source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "odd", source, "pairs = odd:Fm"))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    assert known_models() == [*MODELS, "pairs"]
    assert find_model("neumf") is MODELS["neumf"]
    for search in (lambda: find_model("pairs"), all_models):
        with pytest.raises(SettingsError, match=rf"^model 'pairs' of the package odd 1\.0: .*{problem}"):
            search()


def test_a_name_that_two_models_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "a", "one", SOURCE, "ease = one:Fm", "blend = one:Fm"))
    assert find_model("ease") is MODELS["ease"]
    with pytest.raises(SettingsError, match=r"^model '.*' of the package one 1\.0: recspec itself has a model of this"):
        all_models()
    for name in ("blend", "blnd"):
        with pytest.raises(SettingsError, match=f"unknown model '{name}'"):
            find_model(name)
    for package in ("two", "three"):
        monkeypatch.syspath_prepend(install(tmp_path / package, package, SOURCE, f"pairs = {package}:Fm"))
    with pytest.raises(SettingsError, match=r"has the same name; uninstall one of the packages"):
        find_model("pairs")
