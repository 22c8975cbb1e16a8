"""recspec: raw interaction and click logs to trained, measured and served recommenders.

    import recspec as rs

    data = rs.prepare(frame, user="customer", item="sku", timestamp="bought_at", out="data")
    model = rs.train("ease", data, "run")
    model.recommend(["alice", "bob"], k=10)

The names below are loaded when they are first used, so that the import itself takes no time.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recspec.api import *
    from recspec.base.errors import Interrupted, RecspecError

__version__ = "0.1.0"

__all__ = [
    "AutoResult", "Backtest", "BlendedModel", "CatalogueState", "Data", "Description", "Drift", "EvaluationResult",
    "ExperimentList", "ExperimentResult", "Exported", "Forgotten", "Imported", "Interrupted", "Listing",
    "MethodTable", "Model", "Note", "PipelineModel", "Plan", "RecspecError", "Report", "Runs", "Search", "Serving",
    "Update", "auto", "backtest", "blend", "catalogue", "check", "compare", "compare_folder", "datasets",
    "describe", "drift", "evaluate", "experiment_check", "experiment_report", "export", "forget", "import_tf",
    "models", "open", "open_data", "pipeline", "predict", "prepare", "recommend", "report", "runs", "serve",
    "similar", "synthesize", "train", "transcode", "tune", "update", "verify",
]  # fmt: skip

_FOLDERS = frozenset({"datasets", "export", "models", "report"})
"""Verbs that are folders of the package too: `rs.export(...)`, and `from recspec.export import ...`."""
_OF_ERRORS = frozenset({"Interrupted", "RecspecError"})


class _Verb(ModuleType):
    """A folder of the package that can be called as the verb of the same name."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return _from_api(self.__name__.rpartition(".")[2])(*given, **named)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(_from_api(self.__name__.rpartition(".")[2]))

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        import inspect

        name = self.__name__.rpartition(".")[2]
        first, _, rest = (inspect.getdoc(_from_api(name)) or "").partition("\n")
        return f"{first}\n\n{name}{self.__signature__}\n{rest}"  # help() shows a module's text, and no signature


class _Package(ModuleType):
    """The package, which makes callable those of its folders that are verbs."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FOLDERS and type(value) is ModuleType:
            value.__class__ = _Verb
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _from_api(name: str) -> Any:
    from importlib import import_module

    return getattr(import_module("recspec.base.errors" if name in _OF_ERRORS else "recspec.api"), name)


def __getattr__(name: str) -> Any:
    if name in _FOLDERS or name == "api":  # help(recspec.api.prepare) shows the verb, and not its folder
        from importlib import import_module

        return import_module(f"recspec.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'recspec' has no attribute '{name}'")
    found = globals()[name] = _from_api(name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
