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

from isobn_finetune.config import create_run_config, load_yaml, merge, nest, parse_overrides
from isobn_finetune.errors import ConfigError, IsobnError
from isobn_finetune.version import __version__

app = typer.Typer(
    name="isobn-finetune",
    help="Fine-tune BERT-family encoders on sentence tasks with isotropic batch normalization (IsoBN, AAAI 2021).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its panels print local variables: tokens, rows of the data
    context_settings={"help_option_names": ["-h", "--help"]},
)
list_app = typer.Typer(help="List tasks, norms or models.", rich_markup_mode=None)
app.add_typer(list_app, name="list")

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


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


@app.command(
    epilog="Examples:  isobn-finetune run --task stsb --model tiny   |   "
    "isobn-finetune run --task rte --model roberta-base --norm isobn --seed 3   |   "
    "isobn-finetune run --config runs/rte/config.yaml --output-dir runs/again --set norm.beta=0.25"
)
def run(
    task: Annotated[str | None, typer.Option(help="Task, such as rte or STS-B; see 'list tasks'.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, or 'tiny'; see 'list models'.")] = None,
    norm: Annotated[str | None, typer.Option(help="none, batchnorm or isobn.")] = None,
    data: Annotated[
        str | None, typer.Option(help="'hub', 'demo', or a folder in GLUE's original layout or with parquet.")
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Run folder. [default: runs/<model>/<task>/<norm>/seed_<n>]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of head, dropout and order of rows.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training rows.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens a row; longer rows are cut.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; named options and --set win over it.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config key; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run there and start afresh.")] = False,
    debug: Debug = False,
) -> None:
    """Fine-tune one model on one task with one norm."""
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other: go on with the run, or start afresh")
    named = {
        "task": task,
        "model.name": model,
        "norm.name": norm,
        "data.source": data,
        "output_dir": output_dir,
        "seed": seed,
        "precision": precision,
        "train.epochs": epochs,
        "train.max_steps": max_steps,
        "train.batch_size": batch_size,
        "train.learning_rate": learning_rate,
        "data.max_length": max_length,
    }
    if resume and config is None and output_dir is not None and (Path(output_dir) / "config.yaml").is_file():
        config = Path(output_dir) / "config.yaml"
        named["output_dir"] = output_dir
    values: dict[str, Any] = load_yaml(config) if config is not None else {}
    values = merge(values, parse_overrides(overrides or []))
    for key, value in named.items():
        if value is not None:
            values = merge(values, nest(key, value))
    run_config = create_run_config(values, str(config or ""))

    _quiet_libraries()
    from isobn_finetune.summary import format_summary
    from isobn_finetune.training import fine_tune

    typer.echo(format_summary(fine_tune(run_config, resume=resume, overwrite=overwrite)))


@app.command(epilog="Example:  isobn-finetune validate configs/smoke.yaml")
def validate(
    file: Annotated[Path, typer.Argument(help="Config file.")],
    debug: Debug = False,
) -> None:
    """Check a config file without running it."""
    config = create_run_config(load_yaml(file), str(file)).resolve()
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


def _quiet_libraries() -> None:
    """Keeps the libraries' own chatter off the terminal; set before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class _StderrHandler(logging.StreamHandler):
    """Plain lines on stderr, above a progress bar where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        tqdm.write(prefix + self.format(record), file=sys.stderr)


def main(args: list[str] | None = None) -> None:
    """Entry point. Every error is one plain line on stderr, and an exit code (see ``errors``)."""
    logger = logging.getLogger("isobn_finetune")
    logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO)
    arguments = (sys.argv[1:] if args is None else args) or ["--help"]
    sys.exit(_call(lambda: app(arguments, standalone_mode=False), debug="--debug" in arguments))


def _call(command: Callable[[], Any], debug: bool) -> int:
    error: BaseException
    try:
        code = command()
        return code if isinstance(code, int) else 0
    except typer.Exit as exit_request:
        return exit_request.exit_code
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
