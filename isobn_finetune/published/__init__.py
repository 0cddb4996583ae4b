"""Dev scores that others published, each with its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import yaml

from isobn_finetune.tasks import PAPER_TASKS

_FOLDER = Path(__file__).parent
_COLUMNS = {
    "mnli": ("mnli_m_accuracy",),
    "qnli": ("qnli_accuracy",),
    "sst2": ("sst2_accuracy",),
    "rte": ("rte_accuracy",),
    "mrpc": ("mrpc_f1", "mrpc_accuracy"),
    "cola": ("cola_matthews",),
    "stsb": ("stsb_spearman",),
}


@dataclass
class Published:
    """One row of published dev scores, in points.

    Attributes:
        scores: Task to its primary metric, or to text where the source gives another one.
    """

    model: str
    norm: str
    scores: dict[str, float | str]
    protocol: str
    source: str


def find_published(model: str) -> list[Published]:
    """Published scores of a model, by the last part of its hub id: of the same checkpoint, not of its like."""
    name = model.rpartition("/")[2].lower()
    rows = [*_load_plain(), *_load_paper()]
    return [row for row in rows if row.model.split()[0].rpartition("/")[2].lower() == name]


def _load_plain() -> list[Published]:
    rows = []
    with (_FOLDER / "glue_dev.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            scores: dict[str, float | str] = {}
            for task, columns in _COLUMNS.items():
                first = next((column for column in columns if line[column]), None)
                if first is not None:
                    value = float(line[first])
                    scores[task] = value if first == columns[0] else f"{value:g} (accuracy)"
            rows.append(Published(line["model"], "none", scores, line["protocol"], line["source"]))
    return rows


def _load_paper() -> list[Published]:
    lines = yaml.safe_load((_FOLDER / "paper_results.yaml").read_text(encoding="utf-8"))
    rows = []
    for line in lines:
        scores: dict[str, float | str] = {task: line[task] for task in PAPER_TASKS if line[task] is not None}
        if scores:
            rows.append(Published(line["model"], line["norm"], scores, "the IsoBN paper", str(line["source"])))
    return rows
