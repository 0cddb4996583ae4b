"""``isobn-finetune report``."""

from __future__ import annotations

from typing import Annotated

import typer

from isobn_finetune.commands.options import Debug

REPORT_EXAMPLES = (
    "Examples:  isobn-finetune report runs/small --output-dir runs/small/report   |   "
    "isobn-finetune report runs/bert runs/roberta --output-dir comparison"
)


def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders with run folders in them.")],
    output_dir: Annotated[str, typer.Option(help="Folder for report.{md,csv,json,tex,html} and plots.")],
    debug: Debug = False,
) -> int:
    """Make tables, intervals, tests, plots and a web page from run folders."""
    from isobn_finetune.report import create_report
    from isobn_finetune.report_files import write_report
    from isobn_finetune.report_text import format_terminal

    made = create_report(folders)
    write_report(made, output_dir)
    typer.echo(format_terminal(made))
    typer.echo(f"\nfiles: {output_dir} (report.html, report.md, report.csv, report.json, report.tex and plots)")
    for problem in made.problems:
        typer.echo(f"isobn-finetune: {problem}", err=True)
    return 1 if made.problems else 0
