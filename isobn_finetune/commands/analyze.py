"""``isobn-finetune analyze``."""

from __future__ import annotations

from typing import Annotated

import typer

from isobn_finetune.commands.options import Debug, quiet_libraries

ANALYZE_EXAMPLES = (
    "Examples:  isobn-finetune analyze --model tiny --task stsb   |   "
    "isobn-finetune analyze --model bert-base-cased --task rte --task mrpc --output-dir isotropy   |   "
    "isobn-finetune analyze --model runs/rte --compare-to bert-base-cased --task rte"
)


def analyze(
    model: Annotated[str, typer.Option(help="Hub id, local folder, run folder, or 'tiny'.")],
    task: Annotated[list[str], typer.Option(help="Task whose rows are embedded; may be repeated.")],
    norm: Annotated[
        list[str] | None, typer.Option(help="Norm to fit on the rows; may be repeated. [default: all]")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="'hub', 'demo', or a folder in GLUE's original layout or with parquet.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split to embed.")] = "train",
    max_rows: Annotated[int | None, typer.Option(help="Embed the first rows only.")] = None,
    representation: Annotated[
        str | None, typer.Option(help="pooler, cls or mean. [default: the model's own, and cls beside it]")
    ] = None,
    output_dir: Annotated[str | None, typer.Option(help="Folder for analyze.{json,csv,md,html} and plots.")] = None,
    top_k: Annotated[int, typer.Option(help="Report EV_1 to EV_k.")] = 3,
    max_length: Annotated[int, typer.Option(help="Tokens a row; longer rows are cut.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Rows at once; does not change the result.")] = 64,
    compare_to: Annotated[str | None, typer.Option(help="Another model to embed the same rows with.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that the model's folder brings along.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure and draw the isotropy of sentence embeddings, before and after each norm."""
    quiet_libraries()
    from isobn_finetune.analyze import DEFAULT_NORMS
    from isobn_finetune.analyze import analyze as run_analysis
    from isobn_finetune.analyze_report import format_analysis

    analysis = run_analysis(
        model,
        task,
        norms=norm or DEFAULT_NORMS,
        source=data,
        split=split,
        max_rows=max_rows,
        representation=representation,
        output_dir=output_dir,
        top_k=top_k,
        max_length=max_length,
        batch_size=batch_size,
        compare_to=compare_to,
        trust_remote_code=trust_remote_code,
    )
    typer.echo(format_analysis(analysis))
