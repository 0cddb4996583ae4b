"""Tables, files and the page of an analysis."""

from __future__ import annotations

import base64
import csv
import html
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobn_finetune import plots
from isobn_finetune.analysis import (
    AVERAGE,
    MEASURES,
    TRAINED,
    Analysis,
    EmbeddedTask,
    average_measures,
)
from isobn_finetune.errors import ConfigError
from isobn_finetune.run_folder import write_json, write_text

REPRESENTATION_TITLES = {
    "pooler": "pooler output",
    "cls": "raw [CLS] (last hidden state of token 0)",
    "mean": "mean of the last hidden states",
}

_MEASURE_TITLES = {
    "isoscore": "IsoScore",
    "isoscore_star": "IsoScore*",
    "participation_ratio": "part. ratio",
    "mean_abs_correlation": "mean |corr|",
    "std_variation": "std CV",
    "mean_cosine": "mean cos",
}

_LEGEND = (
    "EV_k: share of the variance in the k largest principal directions, 1 for one direction, k/d where isotropic.",
    "IsoScore: 0 (one direction) to 1 (isotropic); IsoScore*: the same after shrinkage, for few rows.",
    "Participation ratio: effective rank, 1 to d. Mean |corr|: of two different dimensions.",
    "std CV: how unequal the dimensions' standard deviations are. Mean cos: of all pairs of rows, not centred.",
)


@dataclass
class Table:
    """A table with a title; a line break in a heading marks a group and its member."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def to_text(self) -> str:
        """Aligned columns for the terminal, words to the left and numbers to the right."""
        heads = [cell.rpartition("\n") for cell in self.header]
        rows = [[member for _, _, member in heads], *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        are_words = [all(cell[:1].isalpha() for cell in column) for column in zip(*self.rows, strict=True)]
        groups, position, last = "", 0, ""
        for (group, _, _), width in zip(heads, widths, strict=True):
            if group and group != last:
                groups = groups.ljust(position) + group  # over its first member, and on over the next
            position, last = position + width + 2, group
        aligned = [
            "  ".join(
                cell.ljust(width) if is_word else cell.rjust(width)
                for cell, width, is_word in zip(row, widths, are_words, strict=True)
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, "", *([groups] if groups else []), *aligned])

    def to_markdown(self) -> str:
        """A Markdown table."""
        header = [_escape_markdown(cell.replace("\n", " ")) for cell in self.header]
        rule = ["---"] + ["---:"] * (len(header) - 1)
        rows = [[_escape_markdown(cell) for cell in row] for row in self.rows]
        body = "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
        return f"### {_escape_markdown(self.title)}\n\n{body}\n"

    def to_html(self) -> str:
        """An HTML table."""
        like = self.rows[0] if self.rows else self.header
        header = "".join(
            f"<th{_word(below)}>{html.escape(cell).replace(chr(10), '<br>')}</th>"
            for cell, below in zip(self.header, like, strict=True)
        )
        cells = [[f"<td{_word(cell)}>{html.escape(cell)}</td>" for cell in row[1:]] for row in self.rows]
        body = "".join(
            f"<tr><th>{html.escape(row[0])}</th>{''.join(others)}</tr>"
            for row, others in zip(self.rows, cells, strict=True)
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption><thead><tr>{header}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


def create_tables(analysis: Analysis) -> list[Table]:
    """For each representation EV_k by task and norm, the average last, and the other measures; then the comparison."""
    tables = []
    for representation in analysis.representations:
        tasks = analysis.select(representation)
        what = f"{REPRESENTATION_TITLES[representation]}, {_short(analysis.model)}, split {analysis.split}"
        tables.append(_create_ev_table(tasks, analysis.top_k, f"Explained variance of the {what}"))
        tables.append(_create_measure_table(tasks, f"Other measures of the {what}"))
    if analysis.compare_to is not None:
        tables.append(_create_comparison(analysis))
    return tables


def format_analysis(analysis: Analysis) -> str:
    """Tables and notes for the terminal."""
    parts = [table.to_text() for table in create_tables(analysis)]
    notes = [f"  {line}" for line in list_notes(analysis)]
    return "\n\n".join([*parts, "\n".join(["Notes", *notes]), "\n".join(_LEGEND)])


def list_notes(analysis: Analysis) -> list[str]:
    """Notes of all tasks, each with the task and representation that it is about."""
    return [f"{task.spec.title}, {task.representation}: {note}" for task in analysis.tasks for note in task.notes]


def write_analysis(analysis: Analysis, folder: Path) -> list[Path]:
    """Writes ``analyze.{json,csv,md,html}`` and ``plots/``, all of it or nothing.

    Returns:
        What was written, ``analyze.html`` last.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Drawing takes a while: whoever interrupts it finds nothing, or what an earlier analysis left.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".analyze.") as name:
            stage = Path(name)
            (stage / "plots").mkdir()
            drawn = [figure for task in analysis.tasks for figure in _draw(analysis, task, stage / "plots")]
            write_json(stage / "analyze.json", analysis.to_json())
            write_text(stage / "analyze.csv", create_csv(analysis))
            write_text(stage / "analyze.md", create_markdown(analysis, stage, drawn))
            write_text(stage / "analyze.html", create_page(analysis, drawn))
            for path in sorted(path for path in stage.rglob("*") if path.is_file()):
                target = folder / path.relative_to(stage)
                target.parent.mkdir(exist_ok=True)
                path.replace(target)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write here ({error.strerror}). Choose another --output-dir.") from None
    figures = [folder / figure.relative_to(stage) for figure in drawn]
    return [*figures, *(folder / f"analyze.{kind}" for kind in ("json", "csv", "md", "html"))]


def create_csv(analysis: Analysis) -> str:
    """One line a task, representation and norm; undefined values are empty and have a reason."""
    names = [f"ev{k}" for k in range(1, analysis.top_k + 1)] + list(MEASURES)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["task", "representation", "norm", "model", "split", "hidden_size", "n", *names, "reason"])
    for representation in analysis.representations:
        tasks = analysis.select(representation)
        lines = [(task.spec.name, norm, normed.measures) for task in tasks for norm, normed in task.norms.items()]
        if len(tasks) > 1:
            lines += [(AVERAGE, norm, average_measures(tasks, norm)) for norm in tasks[0].norms]
        for task, norm, row in lines:
            values = ["" if row[name] is None else repr(row[name]) for name in names]
            head = [task, representation, norm, analysis.model, analysis.split, tasks[0].hidden_size, row["n"]]
            writer.writerow([*head, *values, row.get("reason", "")])
    return file.getvalue()


def create_markdown(analysis: Analysis, folder: Path, figures: Sequence[Path]) -> str:
    """Tables, notes and links to the figures."""
    parts = [f"# Isotropy of {_escape_markdown(analysis.model)}", _escape_markdown(_describe(analysis))]
    parts += [table.to_markdown().rstrip() for table in create_tables(analysis)]
    parts.append("\n".join(f"- {_escape_markdown(note)}" for note in list_notes(analysis)))
    parts.append("\n".join(f"- {line}" for line in _LEGEND))
    parts += [f"![{path.stem}]({path.relative_to(folder).as_posix()})" for path in figures]
    return "\n\n".join(part for part in parts if part) + "\n"


def create_page(analysis: Analysis, figures: Sequence[Path]) -> str:
    """One page that needs no other file: tables, notes, and figures as data."""
    title = f"Isotropy of {analysis.model}"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in list_notes(analysis))
    legend = "".join(f"<li>{html.escape(line)}</li>" for line in _LEGEND)
    images = "".join(
        f'<figure{_wide(path)}><img alt="{html.escape(path.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode("ascii")}"></figure>'
        for path in figures
    )
    tables = "".join(f'<div class="scroll">{table.to_html()}</div>' for table in create_tables(analysis))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(_describe(analysis))}</p>"
        f"<h2>What stands out</h2><ul>{notes}</ul><h2>Tables</h2>{tables}"
        f'<ul class="legend">{legend}</ul>'
        f'<h2>Plots</h2><div class="figures">{images}</div></body></html>\n'
    )


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; overflow-wrap: anywhere }
h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #ccc }
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: .3em 0 }
th, td { padding: .25em .7em; text-align: right }
thead th { border-bottom: 2px solid #333; vertical-align: bottom }
tbody tr { border-bottom: 1px solid #ddd }
th:first-child, .word { text-align: left }
.legend { color: #555; font-size: .9em }
.figures { display: flex; flex-wrap: wrap; gap: 1em }
figure { margin: 0; flex: 1 1 430px }
figure.wide { flex-basis: 100% }
img { max-width: 100%; height: auto; border: 1px solid #ddd }
@media print {
  body { font-size: 10px } th, td { padding: .2em .4em } tr { break-inside: avoid } .figures { display: block }
}
"""


def _describe(analysis: Analysis) -> str:
    tasks = list(dict.fromkeys(task.spec.title for task in analysis.tasks))
    rows = {task.spec.title: task.norms["none"].measures["n"] for task in analysis.tasks}
    counts = ", ".join(f"{title} {rows[title]} rows" for title in tasks)
    width = analysis.tasks[0].hidden_size
    return (
        f"Split {analysis.split} of {counts}, from {analysis.source}; {width} dimensions. Each norm's statistics are "
        "fitted on exactly these rows, without a moving average."
    )


def _create_ev_table(tasks: Sequence[EmbeddedTask], top_k: int, title: str) -> Table:
    names = [f"ev{k}" for k in range(1, top_k + 1)]
    norms = list(tasks[0].norms)
    header = ["task", "n"] + [f"{_norm_title(tasks[0], norm)}\nEV_{k}" for norm in norms for k in range(1, top_k + 1)]
    lines = [(task.spec.title, {norm: task.norms[norm].measures for norm in norms}) for task in tasks]
    if len(tasks) > 1:
        lines.append((AVERAGE, {norm: average_measures(tasks, norm) for norm in norms}))
    rows = [
        [name, str(by_norm["none"]["n"]), *(_number(by_norm[norm][ev]) for norm in norms for ev in names)]
        for name, by_norm in lines
    ]
    return Table(title, header, rows)


def _create_measure_table(tasks: Sequence[EmbeddedTask], title: str) -> Table:
    norms = list(tasks[0].norms)
    lines = [(task.spec.title, norm, task.norms[norm].measures) for task in tasks for norm in norms]
    if len(tasks) > 1:
        lines += [(AVERAGE, norm, average_measures(tasks, norm)) for norm in norms]
    rows = [
        [name, _norm_title(tasks[0], norm), str(row["n"]), *(_number(row[measure], measure) for measure in MEASURES)]
        for name, norm, row in lines
    ]
    return Table(title, ["task", "norm", "n", *_MEASURE_TITLES.values()], rows)


def _create_comparison(analysis: Analysis) -> Table:
    names = [f"ev{k}" for k in range(1, analysis.top_k + 1)] + ["isoscore"]
    titles = [f"EV_{k}" for k in range(1, analysis.top_k + 1)] + ["IsoScore"]
    sides = (str(analysis.compare_to), analysis.model)
    rows = []
    for task in analysis.tasks:
        if task.compared is not None:
            values = (task.compared, task.norms["none"].measures)
            cells = [_number(side[name]) for side in values for name in names]
            rows.append([f"{task.spec.title}, {task.representation}", *cells])
    header = ["task"] + [f"{Path(side).name}\n{title}" for side in sides for title in titles]
    return Table(f"Without a norm: {sides[0]}, and beside it {sides[1]}", header, rows)


def _norm_title(task: EmbeddedTask, norm: str) -> str:
    """A trained norm by its own name too."""
    return f"{norm} {task.norms[norm].norm['name']}" if norm == TRAINED else norm


def _draw(analysis: Analysis, task: EmbeddedTask, folder: Path) -> list[Path]:
    """Draws a task's figures as PNG and SVG and returns the PNG files."""
    normed = {_norm_title(task, norm): value for norm, value in task.norms.items() if value.shares is not None}
    if not normed or task.correlation is None:
        return []  # the notes say why
    about = f"{_short(analysis.model)}, {task.spec.title}, {REPRESENTATION_TITLES[task.representation]}"
    stem = f"{task.spec.name}_{task.representation}"

    def paths(kind: str) -> list[Path]:
        return [folder / f"{stem}_{kind}.{suffix}" for suffix in ("png", "svg")]

    spreads = {norm: value.spreads for norm, value in normed.items() if value.spreads is not None}
    shares = {norm: value.shares for norm, value in normed.items() if value.shares is not None}
    points = {norm: value.points for norm, value in normed.items() if value.points is not None}
    plots.plot_spreads(spreads, paths("spreads"), f"Standard deviations of dimensions\n{about}")
    mean = task.norms["none"].measures["mean_abs_correlation"]
    remark = "" if mean is None else f"mean |correlation| {mean:.3f}; scaling single dimensions does not change it"
    plots.plot_correlation(
        task.correlation, paths("correlation"), f"Correlation of dimensions, norm none\n{about}", remark
    )
    plots.plot_spectrum(shares, paths("spectrum"), f"Variance by principal direction\n{about}", analysis.top_k)
    kinds = ["spreads", "correlation", "spectrum"]
    if task.hidden_size > 1:
        title = f"First two principal directions\n{about}"
        plots.plot_components(points, shares, task.labels, task.spec.labels, paths("components"), title)
        kinds.append("components")
    return [paths(kind)[0] for kind in kinds]


def _short(model: str) -> str:
    """A hub id as it is, a longer path by its last two parts."""
    parts = Path(model).parts
    return model if len(parts) <= 2 else str(Path("...", *parts[-2:]))


def _number(value: Any, measure: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if measure == "participation_ratio" else f"{value:.4f}"


def _wide(path: Path) -> str:
    """Panels side by side need the whole width."""
    return ' class="wide"' if path.stem.endswith("components") else ""


def _word(cell: str) -> str:
    return ' class="word"' if cell[:1].isalpha() else ""


def _escape_markdown(text: str) -> str:
    """Keeps underscores, stars and pipes of names as they are."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, "\\" + character)
    return text
