"""The command line: what `recspec --help` lists."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from typer import Option, Typer
from typer.models import ArgumentInfo

from recspec import __version__
from recspec.base.errors import Interrupted, RecspecError, missing_library, of_the_machine
from recspec.base.machine import wait_politely
from recspec.cli.answer_commands import evaluate, predict
from recspec.cli.bench_commands import bench_infer, bench_serve, bench_train
from recspec.cli.console import Json, err, first_line, out, print_json, print_settings
from recspec.cli.data_commands import check, describe, prepare, synthesize, transcode
from recspec.cli.demo_command import demo
from recspec.cli.export_commands import export, import_tf, verify
from recspec.cli.process import STOPPED, ended_like_ctrl_c
from recspec.cli.recommend_commands import recommend, similar
from recspec.cli.report_commands import report, runs
from recspec.cli.serve_command import serve
from recspec.cli.training_commands import auto, blend, build, train, tune, update

Command = TypeVar("Command", bound=Callable[..., Any])


class Commands(Typer):
    """Commands whose paths may be URLs of stores; the functions get local paths."""

    def command(self, *args: Any, **settings: Any) -> Callable[[Command], Command]:
        """Register a command, and have every URL that it is given resolved first."""
        register = super().command(*args, **settings)

        def registered(function: Command) -> Command:
            paths = _take_urls(function)
            places = [*paths, *({"models", "retriever", "against"} & {*function.__annotations__})]

            @wraps(function)
            def checked(**values: object) -> object:
                from recspec.base import stores
                from recspec.base.files import local

                with stores.resolved(function.__name__, {name: values[name] for name in places}) as changed:
                    values |= changed
                    for name in paths:
                        value = values.get(name)
                        for path in value if isinstance(value, (list, tuple)) else [value]:
                            if path is not None:
                                local(cast(str, path), _told_name(function, name))
                        values[name] = _as_paths(value)
                    return function(**values)

            register(checked)
            return function

        return registered


def _take_urls(function: Callable[..., object]) -> list[str]:
    """Let the paths of a command be URLs, which `Path` would shorten by a slash; returns the names of its paths."""
    paths = []
    for name, hint in get_type_hints(function, include_extras=True).items():
        base, *told = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if base in (Path, Path | None, list[Path], list[Path] | None):
            paths.append(name)
            for each in told:
                each.path_type = str
    return paths


def _as_paths(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [Path(each) for each in value]
    return None if value is None else Path(cast(str, value))


def _told_name(function: Callable[..., object], name: str) -> str:
    """An argument as `--help` shows it: `OUT`, `--recipe`."""
    _, info = get_args(get_type_hints(function, include_extras=True)[name])
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    return next((each for each in given if each.startswith("--")), f"--{name.replace('_', '-')}")


# --- commands that list what recspec knows ---------------------------------------------------------------------------


def models(json_output: Json = False) -> None:
    """List the models, the roles they need and all settings."""
    from recspec.models import all_models
    from recspec.training import TrainSettings

    if json_output:
        from recspec import api

        print_json(api.models().to_dict())
        return
    for name, model in all_models().items():
        out.print(f"[bold]{name}[/bold]  {first_line(model.__doc__)}  needs: {', '.join(model.needs)}", markup=True)
        print_settings(f"settings of {name}", model.Settings)
    print_settings("settings of training (--set train.NAME=VALUE)", TrainSettings)


def datasets(json_output: Json = False) -> None:
    """List the datasets of `recspec prepare` and their settings."""
    from recspec.datasets import DATASETS

    if json_output:
        from recspec import api

        print_json(api.datasets().to_dict())
        return
    for name, dataset in DATASETS.items():
        out.print(f"[bold]{name}[/bold]  {dataset.about}", markup=True)
        print_settings(f"settings of {name}", dataset.Settings)


def schema(
    columns: Annotated[bool, Option("--columns", help="Print the schema of a columns file instead.")] = False,
) -> None:
    """Print the JSON Schema of a specification file, for editors."""
    if not columns:
        from recspec.feature_spec import json_schema

        print_json(json_schema())
        return
    from recspec.data.prepare import columns_schema

    print_json(columns_schema())


def version() -> None:
    """Print the version of recspec."""
    out.print(__version__)


# --- the application -------------------------------------------------------------------------------------------------

app = Commands(
    help="Turn raw interaction and click logs into trained, measured and served recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = Commands(help="Measure the speed of models, exports and servers.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
pipeline_app = Commands(help="Combine trained models.", no_args_is_help=True)
app.add_typer(pipeline_app, name="pipeline")
for command in (
    prepare,
    check,
    describe,
    synthesize,
    transcode,
    auto,
    train,
    tune,
    update,
    evaluate,
    runs,
    report,
    predict,
    recommend,
    similar,
    verify,
    import_tf,
    export,
    serve,
    models,
    datasets,
    schema,
    version,
    demo,
):
    # An id may begin with a minus: what is no option of `similar` is an argument.
    of_ids = {"ignore_unknown_options": True} if command is similar else None
    app.command(command.__name__.replace("_", "-"), context_settings=of_ids)(command)
for name, measure in (("train", bench_train), ("infer", bench_infer), ("serve", bench_serve)):
    bench_app.command(name)(measure)


def main() -> None:
    """Run the command line and exit with its status."""
    wait_politely()
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


pipeline_app.command("blend")(blend)
pipeline_app.command("build")(build)
