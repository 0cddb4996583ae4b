"""Writes a report's files, each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from isobn_finetune.errors import ConfigError
from isobn_finetune.report_html import format_html
from isobn_finetune.report_plots import save_plots
from isobn_finetune.report_text import format_csv, format_json, format_latex, format_markdown
from isobn_finetune.report_types import Report
from isobn_finetune.run_folder import RunFolder, write_text


def write_report(report: Report, output_dir: str | Path) -> None:
    """Writes ``report.{md,csv,json,tex,html}`` and the plots.

    Raises:
        ConfigError: The folder cannot be written.
    """
    folder = Path(output_dir)
    RunFolder(folder).check_usable()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plots = save_plots(report, folder)
        write_text(folder / "report.md", format_markdown(report, plots))
        write_text(folder / "report.csv", format_csv(report))
        write_text(folder / "report.json", format_json(report))
        write_text(folder / "report.tex", format_latex(report))
        write_text(folder / "report.html", format_html(report, folder, plots))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write here ({error.strerror}); choose another --output-dir") from None
