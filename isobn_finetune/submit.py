"""The GLUE leaderboard's zip from run folders.

Files, headers, labels and row counts as https://gluebenchmark.com asks for them: label words for MNLI, QNLI, RTE and
AX, class numbers for the others, and STS-B's scores between 0 and 5.
"""

from __future__ import annotations

import json
import logging
import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from isobn_finetune.config import RunConfig, create_run_config, load_yaml
from isobn_finetune.data import DEMO, HUB, find_files, load_splits
from isobn_finetune.errors import ConfigError, DataError, IsobnError
from isobn_finetune.predict import predict_rows
from isobn_finetune.readers import read_tsv
from isobn_finetune.results import write_predictions
from isobn_finetune.run_folder import RunFolder
from isobn_finetune.saved_model import open_model
from isobn_finetune.tasks import TaskSpec, get_task
from isobn_finetune.whole_files import check_writable, clean_interrupt, open_whole

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubmissionFile:
    """One file of the zip.

    Attributes:
        name: Its name in the zip.
        task: Whose rows.
        split: Which rows.
        rows: How many GLUE has published.
        trained_on: Task of the run that predicts them.
        required: False for what may be left out without asking.
    """

    name: str
    task: str
    split: str
    rows: int
    trained_on: str
    required: bool = True

    @property
    def spec(self) -> TaskSpec:
        """The task's row."""
        return get_task(self.task)


FILES = (
    SubmissionFile("CoLA.tsv", "cola", "test", 1063, "cola"),
    SubmissionFile("SST-2.tsv", "sst2", "test", 1821, "sst2"),
    SubmissionFile("MRPC.tsv", "mrpc", "test", 1725, "mrpc"),
    SubmissionFile("STS-B.tsv", "stsb", "test", 1379, "stsb"),
    SubmissionFile("MNLI-m.tsv", "mnli", "test_matched", 9796, "mnli"),
    SubmissionFile("MNLI-mm.tsv", "mnli", "test_mismatched", 9847, "mnli"),
    SubmissionFile("QNLI.tsv", "qnli", "test", 5463, "qnli"),
    SubmissionFile("RTE.tsv", "rte", "test", 3000, "rte"),
    SubmissionFile("QQP.tsv", "qqp", "test", 390_965, "qqp", required=False),
    SubmissionFile("WNLI.tsv", "wnli", "test", 146, "wnli", required=False),
    SubmissionFile("AX.tsv", "ax", "test", 1104, "mnli", required=False),
)


@dataclass
class Submission:
    """What went into the zip: rows by file, and what is missing with the reason."""

    path: Path
    files: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass
class _Part:
    """One file to be: predictions that are there, or rows to predict."""

    file: SubmissionFile
    run: Path
    predictions: list[Any] | None = None
    rows: Dataset | None = None

    @property
    def path(self) -> Path:
        """Where the run keeps these predictions."""
        name = self.file.split if self.file.task == self.file.trained_on else self.file.task
        return RunFolder(self.run).predictions / f"{name}.jsonl"


def submit(
    runs: Sequence[str], output: Path, source: str | None = None, allow_partial: bool = False, batch_size: int = 64
) -> Submission:
    """Writes the zip; test predictions that a run lacks are made, and kept in its folder.

    Args:
        runs: Finished run folders, at most one for each task.
        output: The zip.
        source: Where the test sets are; ``None``: what each run was trained on.
        allow_partial: Write the rest where something cannot be made.
        batch_size: Rows at once.

    Raises:
        ConfigError: Nothing was started: a run or the output cannot be used, or files cannot be made.
    """
    if output.suffix.lower() != ".zip":
        raise ConfigError(f"--output {output}: the leaderboard takes a zip; name it .zip")
    check_writable(output, "--output")
    configs = _read_runs(runs)
    submission = Submission(output)
    parts = _plan(configs, source, submission)
    if submission.missing and not allow_partial:
        raise ConfigError(
            f"cannot make {len(submission.missing)} of the files: {'; '.join(submission.missing)}. "
            "--allow-partial writes the rest"
        )
    if not parts:
        raise ConfigError(f"none of the files can be made: {'; '.join(submission.missing)}")
    with clean_interrupt():
        for part in parts:
            if part.predictions is None:
                part.predictions = _predict(part, batch_size)
        with open_whole(output, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for part in parts:
                # A fixed date, so that equal predictions give an equal zip.
                entry = zipfile.ZipInfo(part.file.name, date_time=(1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, format_file(part.file, part.predictions or []))
                submission.files[part.file.name] = len(part.predictions or [])
    return submission


def _read_runs(runs: Sequence[str]) -> dict[str, tuple[Path, RunConfig]]:
    """Task to run, each run finished and each task once."""
    found: dict[str, tuple[Path, RunConfig]] = {}
    for name in runs:
        folder = RunFolder(Path(name).expanduser())
        if not folder.config.is_file():
            raise ConfigError(f"{name}: no run here (no config.yaml); give the folders that 'run' wrote")
        config = create_run_config(load_yaml(folder.config), str(folder.config))
        try:
            result = folder.read_result()
        except DataError as error:
            raise ConfigError(str(error)) from None
        if result is None or result["status"] != "finished":
            raise ConfigError(f"{name}: {folder.describe()}; finish it, or leave it out")
        if config.task in found:
            raise ConfigError(f"{found[config.task][0]} and {name} are both runs of {config.spec.title}; choose one")
        found[config.task] = (folder.path, config)
    return found


def _plan(configs: dict[str, tuple[Path, RunConfig]], source: str | None, submission: Submission) -> list[_Part]:
    """Finds for each file its predictions or its rows, and notes what cannot be made and why."""
    parts = []
    for file in FILES:
        if file.trained_on not in configs:
            if file.required:
                submission.missing.append(f"{file.name}: no run of {get_task(file.trained_on).title} is given")
            continue
        run, config = configs[file.trained_on]
        part = _Part(file, run)
        try:
            if part.path.is_file():
                part.predictions = read_predictions(part.path, file)
            else:
                part.rows = _load_rows(file, source or config.data.source)
        except IsobnError as error:
            if file.task != file.trained_on:  # AX comes along where its rows do
                logger.info("%s is left out: %s", file.name, error)
            else:
                submission.missing.append(f"{file.name}: {error}")
            continue
        parts.append(part)
    return parts


def _load_rows(file: SubmissionFile, source: str) -> Dataset:
    rows = load_splits(file.spec, source, [file.split])[file.split]
    if len(rows) != file.rows:
        raise ConfigError(
            f"--data {source}: {len(rows)} rows in {file.split}, GLUE has {file.rows}; give GLUE's own with --data"
        )
    if source not in (HUB, DEMO):
        for path in find_files(file.spec, source, [file.split], {file.split})[file.split]:
            if path.suffix == ".tsv":
                _check_ids(path)
    return rows


def _check_ids(path: Path) -> None:
    """Refuses a file whose own ids are not 0, 1, 2, ...: our predictions go by place."""
    header, rows, lines = read_tsv(path)
    column = next((name for name in ("index", "id") if name in header), None)
    if column is None:
        return
    place = header.index(column)
    for number, row in enumerate(rows):
        if row[place] != str(number):
            raise DataError(
                f"{path}: line {lines[number]}: {column} is {row[place][:20]!r} where {number} is expected; put the "
                "rows in GLUE's order"
            )


def read_predictions(path: Path, file: SubmissionFile) -> list[Any]:
    """Reads predictions that a run holds, and checks ids, number and values.

    Raises:
        DataError: Something does not fit, named by line.
    """
    remedy = "remove the file to have it made again"
    values = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            index, prediction = row["idx"], row["prediction"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{path}: line {number}: no prediction; {remedy}") from None
        if index != number - 1:
            raise DataError(f"{path}: line {number}: idx {index!r} where {number - 1} is expected; {remedy}")
        if not _is_valid(prediction, file.spec):
            raise DataError(
                f"{path}: line {number}: prediction {str(prediction)[:40]!r} is none of {file.spec.title}'s"
            )
        values.append(prediction)
    if len(values) != file.rows:
        raise DataError(f"{path}: {len(values)} predictions, GLUE has {file.rows} rows; {remedy}")
    return values


def _is_valid(prediction: Any, spec: TaskSpec) -> bool:
    if not spec.is_regression:
        return prediction in spec.labels
    return isinstance(prediction, int | float) and not isinstance(prediction, bool) and math.isfinite(prediction)


def _predict(part: _Part, batch_size: int) -> list[Any]:
    """Predicts the rows and keeps the predictions in the run's folder."""
    assert part.rows is not None
    saved = open_model(str(part.run), part.file.task)
    logits = predict_rows(saved, part.rows, batch_size, f"{saved.spec.title} {part.file.split}")
    write_predictions(part.path, saved.spec, logits, part.rows)
    return read_predictions(part.path, part.file)


def format_file(file: SubmissionFile, predictions: Sequence[Any]) -> str:
    """The text of one file: header ``index``, ``prediction``, and a line a row."""
    spec = file.spec
    lines = ["index\tprediction"]
    for index, prediction in enumerate(predictions):
        if spec.is_regression:
            shown = f"{min(max(float(prediction), 0.0), 5.0):.3f}"
        else:
            shown = prediction if spec.label_words else str(spec.labels.index(prediction))
        lines.append(f"{index}\t{shown}")
    return "\n".join(lines) + "\n"


def format_submission(submission: Submission) -> str:
    """What ``submit`` prints: the files with their rows, and what is missing."""
    lines = [f"{submission.path}:"]
    lines += [f"  {name:<12}{rows:>7} rows" for name, rows in submission.files.items()]
    lines += [f"  missing: {reason}" for reason in submission.missing]
    return "\n".join(lines)
