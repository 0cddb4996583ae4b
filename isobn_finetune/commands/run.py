"""``isobn-finetune run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from isobn_finetune.commands.options import Debug, quiet_libraries
from isobn_finetune.config import create_run_config, load_yaml, merge, nest, parse_overrides
from isobn_finetune.errors import ConfigError

RUN_EXAMPLES = (
    "Examples:  isobn-finetune run --task stsb --model tiny   |   "
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
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Upload the finished model and its card to the hub.")
    ] = None,
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

    quiet_libraries()
    from isobn_finetune.summary import format_summary
    from isobn_finetune.training import fine_tune

    if push_to_hub is not None:
        from isobn_finetune.hub_upload import check_upload

        check_upload(push_to_hub)
    result = fine_tune(run_config, resume=resume, overwrite=overwrite)
    typer.echo(format_summary(result))
    if push_to_hub is not None:
        from isobn_finetune.hub_upload import upload_model

        typer.echo(f"  uploaded: {upload_model(Path(result.output_dir) / 'model', push_to_hub)}")
