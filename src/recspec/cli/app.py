"""The command line: what `recspec --help` lists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from typer import Context, Typer

from recspec import api
from recspec.base.errors import Interrupted, RecspecError, missing_library, of_the_machine
from recspec.base.machine import limit_openmp_spin
from recspec.cli import presenters
from recspec.cli.console import err, out
from recspec.cli.demo import demo
from recspec.cli.from_verbs import Call, Presenter, add_command
from recspec.cli.process import STOPPED, ended_like_ctrl_c


def run_demo(call: Call) -> None:
    """Run the demo's commands by this very command line."""
    call(run=lambda words: app(words, standalone_mode=False))


COMMANDS: dict[str, tuple[Callable[..., Any], Presenter]] = {
    "prepare": (api.prepare, presenters.prepare),
    "check": (api.check, presenters.check),
    "describe": (api.describe, presenters.describe),
    "synthesize": (api.synthesize, presenters.write_dataset),
    "transcode": (api.transcode, presenters.write_dataset),
    "auto": (api.auto, presenters.auto),
    "train": (api.train, presenters.train),
    "tune": (api.tune, presenters.tune),
    "update": (api.update, presenters.update),
    "drift": (api.drift, presenters.drift),
    "forget": (api.forget, presenters.show),
    "catalogue": (api.catalogue, presenters.show),
    "evaluate": (api.evaluate, presenters.evaluate),
    "compare": (api.compare_folder, presenters.compare),
    "backtest": (api.backtest, presenters.backtest),
    "runs": (api.runs, presenters.show),
    "report": (api.report, presenters.report),
    "predict": (api.predict, presenters.predict),
    "recommend": (api.recommend, presenters.recommend),
    "similar": (api.similar, presenters.similar),
    "verify": (api.verify, presenters.verify),
    "import-tf": (api.import_tf, presenters.import_tf),
    "export": (api.export, presenters.export),
    "serve": (api.serve, presenters.serve),
    "models": (api.models, presenters.models),
    "datasets": (api.datasets, presenters.datasets),
    "schema": (presenters.print_schema, presenters.do),
    "version": (presenters.print_version, presenters.do),
    "demo": (demo, run_demo),
    "experiment check": (api.experiment_check, presenters.show),
    "experiment report": (api.experiment_report, presenters.experiment_report),
    "bench train": (api.bench_train, presenters.bench_train),
    "bench infer": (api.bench_infer, presenters.bench),
    "bench serve": (api.bench_serve, presenters.bench),
    "journal import": (api.journal_import, presenters.show),
    "journal export": (api.journal_export, presenters.show),
    "journal show": (api.journal_show, presenters.show),
    "journal verify": (api.journal_verify, presenters.show),
    "journal prune": (api.journal_prune, presenters.show),
    "pipeline blend": (api.blend, presenters.blend),
    "pipeline build": (api.pipeline, presenters.pipeline),
}
"""Command -> its verb, and what calls it and prints the result."""
GROUPS = {
    "bench": "Measure the speed of models, exports and servers.",
    "experiment": "Compare variants on users, by an experiment.",
    "journal": "Fill, show, check and export the journal of events.",
    "pipeline": "Combine trained models.",
}

FIRST = (
    ("prepare", "table purchases.csv data"),
    ("auto", "data out --minutes 10"),
    ("evaluate", "out/best data --baselines"),
    ("recommend", "out/best --user alice"),
    ("serve", "out/best"),
)
"""Commands from files to a server, in order, with arguments that show what each hands to the next."""

app = Typer(
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def start(context: Context) -> None:
    """Turn raw interaction and click logs into trained, measured and served recommenders."""
    if context.invoked_subcommand is not None:
        return
    out.print("From files to a server in five commands:\n")
    lines = {f"recspec {name} {arguments}": COMMANDS[name][0] for name, arguments in FIRST}
    for line, verb in lines.items():
        out.print(f"  {line:<{max(map(len, lines))}}  {(verb.__doc__ or '').partition(chr(10))[0]}", soft_wrap=True)
    out.print("\n`recspec demo` runs them on a made-up shop. `recspec --help` lists all commands.")


groups = {name: Typer(help=about, no_args_is_help=True) for name, about in GROUPS.items()}
for name, group in groups.items():
    app.add_typer(group, name=name)
for name, (verb, present) in COMMANDS.items():
    first, _, second = name.partition(" ")
    add_command(groups.get(first, app) if second else app, second or first, verb, present)


def main() -> None:
    """Run the command line and exit with its status."""
    limit_openmp_spin()
    try:
        with ended_like_ctrl_c():
            app()
    except Interrupted as stopped:
        if not stopped.told:
            err.print(str(stopped))
        sys.exit(STOPPED)
    except RecspecError as error:
        if not error.told:
            err.print(f"error: {error}", style="red")
        sys.exit(2)
    except (BrokenPipeError, SystemExit) as ended:  # for `| head`, typer and rich end with 1
        if isinstance(ended, SystemExit) and not isinstance(ended.__context__, BrokenPipeError):
            raise
        sys.exit(0)
    except Exception as error:
        told = of_the_machine(error) or missing_library(error)
        if told is None:
            raise
        err.print("\n".join((f"error: {told}", *getattr(error, "__notes__", ()))), style="red")
        sys.exit(2)
