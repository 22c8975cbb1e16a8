"""The command line: what `recspec --help` lists."""

from __future__ import annotations

import sys

from recspec.cli.answer_commands import evaluate, predict, recommend
from recspec.cli.bench_commands import bench_infer, bench_serve, bench_train
from recspec.cli.console import err, print_error
from recspec.cli.data_commands import check, describe, prepare, synthesize, transcode
from recspec.cli.demo_command import demo
from recspec.cli.export_commands import export, import_tf, verify
from recspec.cli.info_commands import datasets, models, schema, version
from recspec.cli.options import Commands
from recspec.cli.serve_command import serve
from recspec.cli.training_commands import train, tune
from recspec.errors import Interrupted, RecspecError, of_the_machine
from recspec.machine import wait_politely

app = Commands(
    help="Turn raw interaction and click logs into trained, measured and served recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = Commands(help="Measure throughput and latency of models, exports and servers.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
for command in (
    prepare, check, describe, synthesize, transcode, train, tune, evaluate, predict, recommend, verify, import_tf,
    export, serve, models, datasets, schema, version, demo,
):  # fmt: skip
    app.command(command.__name__.replace("_", "-"))(command)
for name, measure in (("train", bench_train), ("infer", bench_infer), ("serve", bench_serve)):
    bench_app.command(name)(measure)


def main() -> None:
    """Run the command line and exit with its status."""
    wait_politely()
    try:
        app()
    except Interrupted as stopped:
        if not stopped.told:
            err.print(str(stopped), markup=False, highlight=False)
        sys.exit(130)
    except RecspecError as error:
        if not error.told:
            print_error(error)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        told = of_the_machine(error)
        if told is None:
            raise
        print_error(RecspecError("\n".join((told, *getattr(error, "__notes__", ())))))
        sys.exit(2)
