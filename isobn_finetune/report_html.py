"""A report as one self-contained HTML page."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from isobn_finetune import report_text as text
from isobn_finetune.report_runs import Run, title_of
from isobn_finetune.report_types import Report


def format_html(report: Report, folder: Path, plots: list[str]) -> str:
    """Renders the page.

    Args:
        report: What to show.
        folder: Where the page will lie; links to run folders are relative to it.
        plots: Names of the SVG plots in it, which are taken into the page.
    """
    # Names of models and reasons of failures come from files, so everything is escaped.
    environment = Environment(
        loader=PackageLoader("isobn_finetune"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    search, odd = text.search_table(report), text.odd_table(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        titles=[title_of(task) for task in report.tasks],
        spread=text.SPREAD,
        sections=_sections(report, bool(search)),
        scores=text.score_table(report),
        sources=text.source_lines(report),
        differences=[text.difference_table(comparison) for comparison in report.comparisons],
        wilcoxon=[text.wilcoxon_line(comparison) for comparison in report.comparisons],
        explanation=text.EXPLANATION if report.comparisons else (),
        search=search,
        plots=[_read_plot(folder / f"{name}.svg", text.PLOTS[name], report) for name in plots],
        numbers=text.long_table(report),
        long_explanation=text.LONG_EXPLANATION,
        odd=odd,
        runs=[_describe_run(run, folder) for run in report.runs],
    )


def _sections(report: Report, search: bool) -> list[tuple[str, str]]:
    sections = [("scores", "Scores"), ("differences", "Is a difference real?"), ("notes", "Before believing it")]
    sections += [("search", "Search over settings"), ("plots", "Plots"), ("numbers", "All numbers"), ("runs", "Runs")]
    left_out = {"differences": not report.comparisons, "search": not search}
    return [section for section in sections if not left_out.get(section[0])]


def _read_plot(file: Path, title: str, report: Report) -> dict[str, str]:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    norms = ", ".join(dict.fromkeys(cell.norm for cell in report.cells))
    tasks = ", ".join(title_of(task) for task in report.tasks)
    return {"source": f"data:image/svg+xml;base64,{data}", "title": title, "alt": f"{title}; norms {norms}; on {tasks}"}


def _describe_run(run: Run, folder: Path) -> dict[str, Any]:
    link = quote(Path(os.path.relpath(run.folder.resolve(), folder.resolve())).as_posix() + "/")
    score = "" if run.score is None else f", {100 * run.score:.2f}"
    remark = ", collapsed" if run.collapsed else ""
    return {
        "link": link,
        "path": run.path,
        "text": f"{title_of(run.task)}, {run.norm}, seed {run.seed}, {run.status}{score}{remark}",
    }
