"""``isobn-finetune evaluate``, ``predict``, ``export`` and ``submit``: what is done with a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isobn_finetune.commands.options import Debug, quiet_libraries
from isobn_finetune.errors import ConfigError

EVALUATE_EXAMPLES = (
    "Examples:  isobn-finetune evaluate --model runs/rte --split validation   |   "
    "isobn-finetune evaluate --model ORG/NAME --task mnli --data glue_data --output-dir scores"
)
PREDICT_EXAMPLES = (
    "Examples:  isobn-finetune predict --model runs/sst2 --input new.csv --output predictions.csv   |   "
    "isobn-finetune predict --model runs/rte --split test --output test.jsonl   |   "
    "echo 'A fine film.' | isobn-finetune predict --model runs/sst2 --input -"
)
EXPORT_EXAMPLES = (
    "Examples:  isobn-finetune export --model runs/rte --format hf --output-dir rte-bert   |   "
    "isobn-finetune export --model runs/rte --format onnx --output-dir rte-onnx"
)
SUBMIT_EXAMPLES = "Example:  isobn-finetune submit runs/*/*/isobn/seed_1 --output submission.zip --allow-partial"

Model = Annotated[str, typer.Option(help="Run folder, model folder, or hub id.")]
Task = Annotated[str | None, typer.Option(help="Task; see 'list tasks'. [default: the model's own]")]
Data = Annotated[
    str | None,
    typer.Option(
        help="'hub', 'demo', or a folder in GLUE's original layout or with parquet. [default: the run's own, else hub]"
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows at once; does not change the result.")]


def evaluate(
    model: Model,
    task: Task = None,
    data: Data = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Labelled split; may be repeated. [default: the task's dev sets]")
    ] = None,
    batch_size: BatchSize = 64,
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for evaluate.json and predictions/. [default: only show the scores]")
    ] = None,
    debug: Debug = False,
) -> None:
    """Score a saved model on a labelled split."""
    quiet_libraries()
    from isobn_finetune.predict import evaluate as run_evaluation
    from isobn_finetune.predict import format_evaluation

    typer.echo(format_evaluation(run_evaluation(model, task, data, split, batch_size, output_dir)))


def predict(
    model: Model,
    task: Task = None,
    data: Data = None,
    split: Annotated[str | None, typer.Option(help="Split to predict, such as test.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="File of new texts: .csv, .tsv, .jsonl, .parquet, or .txt with one text a line; - is standard input, "
            "one text a line, of a pair the second after a tab.",
        ),
    ] = None,
    input_format: Annotated[
        str | None, typer.Option(help="csv, tsv, jsonl, parquet or lines. [default: by the file's suffix]")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help=".jsonl, .csv or .tsv file. [default: JSON lines on standard output]")
    ] = None,
    batch_size: BatchSize = 64,
    debug: Debug = False,
) -> None:
    """Write predictions for a split, or for new text."""
    if (source is None) == (split is None):
        raise ConfigError("say what to predict: either --input FILE (- is standard input), or --split NAME")
    if source is not None and data is not None:
        raise ConfigError("--input and --data exclude each other: new texts, or the splits of a task")
    quiet_libraries()
    from isobn_finetune.predict import predict_split, predict_texts

    if source is not None:
        predict_texts(model, source, output, task, input_format, batch_size)
    elif split is not None:
        predict_split(model, split, output, task, data, batch_size)


def export(
    model: Annotated[str, typer.Option(help="Run folder, or model folder.")],
    output_dir: Annotated[str, typer.Option(help="New folder for the exported model.")],
    file_format: Annotated[
        str, typer.Option("--format", help="hf: stock checkpoint with the norm folded in; onnx: model.onnx.")
    ] = "hf",
    debug: Debug = False,
) -> None:
    """Write a stock checkpoint, or ONNX, that needs none of this package."""
    if file_format not in ("hf", "onnx"):
        raise ConfigError(f"--format {file_format}: unknown. Known: hf, onnx.")
    quiet_libraries()
    if file_format == "hf":
        from isobn_finetune.export import export_checkpoint

        report = export_checkpoint(model, Path(output_dir))
    else:
        from isobn_finetune.onnx_export import export_onnx

        report = export_onnx(model, Path(output_dir))
    typer.echo(f"{output_dir}: {report}")


def submit(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders, one for each task.")],
    output: Annotated[str, typer.Option(help="The zip to write.")],
    data: Annotated[
        str | None, typer.Option(help="Where the test sets are. [default: what each run was trained on]")
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Write what can be made when some tasks are missing.")
    ] = False,
    batch_size: BatchSize = 64,
    debug: Debug = False,
) -> None:
    """Make the GLUE leaderboard's zip from run folders."""
    quiet_libraries()
    from isobn_finetune.submit import format_submission
    from isobn_finetune.submit import submit as make_submission

    typer.echo(format_submission(make_submission(runs, Path(output), data, allow_partial, batch_size)))
