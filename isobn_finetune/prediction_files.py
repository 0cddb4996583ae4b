"""Predictions as they are made: JSON lines, CSV or TSV, to a file that appears whole or to standard output."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.readers import parse_labels
from isobn_finetune.results import compute_probabilities
from isobn_finetune.run_folder import dump_json
from isobn_finetune.tasks import HIDDEN_LABEL, TaskSpec
from isobn_finetune.text_files import TextRow
from isobn_finetune.whole_files import check_writable, open_whole

SUFFIXES = (".jsonl", ".csv", ".tsv")
STDOUT = "-"


def check_output(output: str | None, source: str | None = None) -> None:
    """Finds out before any work whether predictions can be written.

    Args:
        output: A file, or ``None`` or ``-`` for standard output.
        source: The file that is read, which must not be the same.

    Raises:
        ConfigError: They cannot.
    """
    if output is None or output == STDOUT:
        return
    path = Path(output).expanduser()
    if not path.is_dir() and path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--output {output}: the suffix says the format. Known: {', '.join(SUFFIXES)}.")
    if source is not None and path.exists() and Path(source).exists() and path.samefile(source):
        raise ConfigError(f"--output {output}: that is the input. Choose another file.")
    check_writable(path, "--output")


class PredictionWriter:
    """Writes one line a row.

    ``idx``, the texts where they are echoed, ``prediction``, ``label`` (the name or number that came with the row,
    else null or empty) and the probability of each class; a regression has none.

    Args:
        file: Where to.
        kind: ``.jsonl``, ``.csv`` or ``.tsv``.
        spec: The task, with the names of the classes.
        columns: Names of the texts, none where they are not echoed.

    Attributes:
        count: Rows written.
        unknown_labels: Rows whose label is none of the task's; they are written as if they had none.
    """

    def __init__(self, file: IO[str], kind: str, spec: TaskSpec, columns: Sequence[str]) -> None:
        self.file = file
        self.kind = kind
        self.spec = spec
        self.columns = tuple(columns)
        self.count = 0
        self.unknown_labels = 0
        if kind != ".jsonl":
            classes = [f"probability_{name}" for name in spec.labels]
            self._write_fields(["idx", *self.columns, "prediction", "label", *classes])

    def write(self, rows: Sequence[TextRow], logits: np.ndarray) -> None:
        """Writes a window of rows, ``logits`` ``(rows, num_labels)``, and hands it on to the system."""
        if self.spec.is_regression:
            predictions: list[Any] = [float(value) for value in logits[:, 0]]
            probabilities: list[list[float]] = [[] for _ in rows]
        else:
            predictions = [self.spec.labels[place] for place in logits.argmax(axis=1)]
            probabilities = compute_probabilities(logits).tolist()
        for row, prediction, shares in zip(rows, predictions, probabilities, strict=True):
            label = self._read_label(row.label)
            texts = row.texts if self.columns else ()
            if self.kind == ".jsonl":
                line: dict[str, Any] = {"idx": self.count, **dict(zip(self.columns, texts, strict=True))}
                line |= {"prediction": prediction, "label": label}
                if shares:
                    line["probabilities"] = dict(zip(self.spec.labels, shares, strict=True))
                self.file.write(dump_json(line) + "\n")
            else:
                self._write_fields([self.count, *texts, prediction, "" if label is None else label, *shares])
            self.count += 1
        self.file.flush()

    def _write_fields(self, fields: Sequence[Any]) -> None:
        if self.kind == ".csv":
            # By hand: the csv module leaves a lone carriage return unquoted, and readers end the row there.
            self.file.write(",".join(map(_quote, map(str, fields))) + "\n")
        else:
            # TSV knows no quoting, so a tab or line end inside a text becomes a space.
            self.file.write("\t".join(re.sub(r"[\t\r\n]", " ", str(field)) for field in fields) + "\n")

    def _read_label(self, value: Any) -> str | float | None:
        if value is None or str(value).strip() in ("", str(HIDDEN_LABEL), str(float(HIDDEN_LABEL))):
            return None
        try:
            label = parse_labels([value], self.spec, labelled=True, where=str)[0]
        except DataError:
            self.unknown_labels += 1
            return None
        return label if self.spec.is_regression else self.spec.labels[int(label)]


def _quote(field: str) -> str:
    """A CSV field as RFC 4180 has it."""
    return '"' + field.replace('"', '""') + '"' if re.search(r'[",\r\n]', field) else field


@contextmanager
def open_predictions(output: str | None, spec: TaskSpec, columns: Sequence[str]) -> Iterator[PredictionWriter]:
    """Opens a file that appears when all is written, or not at all; or standard output, as JSON lines."""
    if output is None or output == STDOUT:
        yield PredictionWriter(sys.stdout, ".jsonl", spec, columns)
        return
    path = Path(output).expanduser()
    with open_whole(path, "w", encoding="utf-8", newline="") as file:
        yield PredictionWriter(file, path.suffix.lower(), spec, columns)
