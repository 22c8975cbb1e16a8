"""The answers of a model as functions: `predict(run, rows)` is `open(run).predict(rows)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from recspec.api.model import Model, open
from recspec.api.verbs import Place, signed, verb

RUN = "    run: A model, or the folder of a run or bundle.\n"
OPENED = "\n    device: auto, cpu, cuda or cuda:N.\n    verify: Check every file against its manifest."


def _of_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a model as a function of a run, which also takes how the run is opened."""

    def function(run: Place, *given: Any, device: str = "auto", verify: bool = True, **named: Any) -> Any:
        if isinstance(run, Model) and (device, verify) == ("auto", True):
            return method(run, *given, **named)
        kind = run.kind if isinstance(run, Model) else None
        return method(open(run, device=device, verify=verify, kind=kind), *given, **named)

    own = inspect.signature(function).parameters
    _, *theirs = inspect.signature(method).parameters.values()
    told, title, rest = (inspect.getdoc(method) or "").partition("Args:\n")
    described, returns, after = rest.partition("\n\nReturns:")
    function.__name__ = function.__qualname__ = method.__name__
    function.__doc__ = f"{told}{title}{RUN}{described}{OPENED}{returns}{after}"
    return verb(signed(function, [own["run"], *theirs, own["device"], own["verify"]]))


predict = _of_run(Model.predict)
recommend = _of_run(Model.recommend)
similar = _of_run(Model.similar)
