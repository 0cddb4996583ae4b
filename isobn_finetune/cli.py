"""The command line: parses, resolves, calls one library function, prints. Imports nothing heavy by itself."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from isobn_finetune.commands.analyze import ANALYZE_EXAMPLES, analyze
from isobn_finetune.commands.models import (
    EVALUATE_EXAMPLES,
    EXPORT_EXAMPLES,
    PREDICT_EXAMPLES,
    SUBMIT_EXAMPLES,
    evaluate,
    export,
    predict,
    submit,
)
from isobn_finetune.commands.options import Debug
from isobn_finetune.commands.report import REPORT_EXAMPLES, report
from isobn_finetune.commands.run import RUN_EXAMPLES, run
from isobn_finetune.commands.sweep import SWEEP_EXAMPLES, sweep
from isobn_finetune.config import create_run_config, load_yaml
from isobn_finetune.errors import IsobnError
from isobn_finetune.sweep_config import create_sweep, expand, is_sweep
from isobn_finetune.version import __version__

app = typer.Typer(
    name="isobn-finetune",
    help="Fine-tune BERT-family encoders on sentence tasks with isotropic batch normalization (IsoBN, AAAI 2021).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its panels print local variables: tokens, rows of the data
    context_settings={"help_option_names": ["-h", "--help"]},
)
list_app = typer.Typer(help="List tasks, norms or models.", rich_markup_mode=None)
app.command("run", epilog=RUN_EXAMPLES)(run)
app.command("analyze", epilog=ANALYZE_EXAMPLES)(analyze)
app.command("evaluate", epilog=EVALUATE_EXAMPLES)(evaluate)
app.command("predict", epilog=PREDICT_EXAMPLES)(predict)
app.command("export", epilog=EXPORT_EXAMPLES)(export)
app.command("submit", epilog=SUBMIT_EXAMPLES)(submit)
app.command("sweep", epilog=SWEEP_EXAMPLES)(sweep)
app.command("report", epilog=REPORT_EXAMPLES)(report)
app.add_typer(list_app, name="list")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune BERT-family encoders on sentence tasks with isotropic batch normalization (IsoBN, AAAI 2021)."""


@app.command(epilog="Example:  isobn-finetune validate configs/smoke.yaml")
def validate(
    file: Annotated[Path, typer.Argument(help="Config file.")],
    debug: Debug = False,
) -> None:
    """Check a config file without running it."""
    values = load_yaml(file)
    if is_sweep(values):
        runs = expand(create_sweep(values, str(file)), ".")
        typer.echo(f"{file}: valid. A sweep of {len(runs)} runs, the first: {runs[0].path}")
        return
    config = create_run_config(values, str(file)).resolve()
    typer.echo(
        f"{file}: valid. {config.spec.title}, {config.model.name}, norm {config.norm.name}, seed {config.seed} "
        f"-> {config.output_dir}"
    )


@list_app.command("tasks")
def list_tasks() -> None:
    """Tasks with their classes and metrics."""
    from isobn_finetune.tasks import TASKS

    for spec in TASKS.values():
        labels = ", ".join(spec.labels) or "a score from 0 to 5"
        typer.echo(f"{spec.name:<6} {spec.title:<6} {', '.join(spec.metrics):<21} {labels}")


@list_app.command("norms")
def list_norms() -> None:
    """Norms with their options and defaults."""
    from isobn_finetune.config import NORM_CONFIGS

    for name, section in NORM_CONFIGS.items():
        options = [f"{key}={field.default}" for key, field in section.model_fields.items() if key != "name"]
        typer.echo(f"{name:<10} {section.__doc__} {' '.join(options)}".rstrip())


@list_app.command("models")
def list_models() -> None:
    """Encoder families, each with an example."""
    from isobn_finetune.families import FAMILIES

    typer.echo("tiny           ships with the package, needs no network")
    for family in FAMILIES.values():
        typer.echo(f"{family.title:<14} such as {family.example}")


class _StderrHandler(logging.StreamHandler):
    """Plain lines on stderr, above a progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        tqdm.write(prefix + self.format(record), file=sys.stderr)


def main(args: list[str] | None = None) -> None:
    """Entry point. Every error is one plain line on stderr, and an exit code (see ``errors``)."""
    # Threads of torch that wait spin, and on a busy machine that takes the cores from those that work: two threads were
    # seen to take three to nine times as long. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    logger = logging.getLogger("isobn_finetune")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):  # called twice in one process
        logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)
    arguments = (sys.argv[1:] if args is None else args) or ["--help"]
    sys.exit(_call(lambda: app(arguments, standalone_mode=False), debug="--debug" in arguments))


def _call(command: Callable[[], Any], debug: bool) -> int:
    error: BaseException
    try:
        code = command()
        if code == 130:  # what Typer makes of Ctrl-C, without a word
            print("isobn-finetune: interrupted", file=sys.stderr)
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has closed it
        return 1
    except IsobnError as caught:
        error, message, exit_code = caught, str(caught), caught.exit_code
    except TyperException as caught:  # unknown or missing options
        error, message, exit_code = caught, caught.format_message(), 2
    except (KeyboardInterrupt, typer.Abort) as caught:
        error, message, exit_code = caught, "interrupted", 130
    except Exception as caught:
        error, message, exit_code = caught, _describe_unforeseen(caught), 1
    if debug:
        traceback.print_exception(error)
    print(f"isobn-finetune: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


def _describe_unforeseen(error: Exception) -> str:
    """An unforeseen error's own text may quote a row of the data or a token, so only an OSError's is shown."""
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or type(error).__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where} (--debug shows the traceback)"
