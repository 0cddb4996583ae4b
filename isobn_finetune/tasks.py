"""The tasks, one row each: columns, labels, metrics and where their splits lie."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from isobn_finetune.errors import ConfigError, shorten

HIDDEN_LABEL = -1
"""Stands for a label that is not published, as in the hub's copy of GLUE."""


@dataclass(frozen=True)
class GlueFile:
    """Where one split lies in the original GLUE folder, and how its tab-separated columns are called.

    Attributes:
        name: File name inside the task's folder.
        text: Columns that hold the texts, by name, or by position where the file has no header.
        label: Column of the label, ``None`` where labels are hidden.
    """

    name: str
    text: tuple[str | int, ...]
    label: str | int | None = None


@dataclass(frozen=True)
class TaskSpec:
    """What is to be known about one task.

    Attributes:
        name: Name in configs, options, folders, and the hub's config name in ``nyu-mll/glue``.
        title: The name that GLUE prints.
        text_columns: One or two columns, as the hub calls them.
        labels: Class names in the hub's order; empty for regression.
        metrics: Names of the reported metrics, the primary first.
        folder: Folder in the original GLUE layout.
        files: Split to file in that folder.
        selection_split: Labelled split on which the best epoch is chosen.
        label_words: True where the GLUE folder writes the class name instead of its number.
    """

    name: str
    title: str
    text_columns: tuple[str, ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: str
    files: dict[str, GlueFile] = field(default_factory=dict)
    selection_split: str = "validation"
    label_words: bool = False

    @property
    def is_regression(self) -> bool:
        """True where the label is a real number."""
        return not self.labels

    @property
    def num_labels(self) -> int:
        """Outputs of the classifier: one for regression."""
        return len(self.labels) or 1

    @property
    def primary_metric(self) -> str:
        """The metric that chooses the best epoch unless ``train.best_metric`` names another."""
        return self.metrics[0]

    @property
    def splits(self) -> tuple[str, ...]:
        """All splits, in order."""
        return tuple(self.files)

    @property
    def labelled_dev_splits(self) -> tuple[str, ...]:
        """The dev splits that are scored: ``validation``, or MNLI's two."""
        return tuple(split for split in self.files if split.startswith("validation"))


def _files(
    text: tuple[str | int, ...],
    label: str | int | None,
    dev: Iterable[str] = ("dev.tsv",),
    test_text: tuple[str | int, ...] | None = None,
    test: Iterable[str] = ("test.tsv",),
) -> dict[str, GlueFile]:
    """Usual GLUE layout: ``train.tsv``, ``dev*.tsv`` and ``test*.tsv``, the last without labels."""
    suffix = {"dev.tsv": "", "dev_matched.tsv": "_matched", "dev_mismatched.tsv": "_mismatched"}
    suffix |= {name.replace("dev", "test"): ending for name, ending in suffix.items()}
    files = {"train": GlueFile("train.tsv", text, label)}
    files |= {f"validation{suffix[name]}": GlueFile(name, text, label) for name in dev}
    files |= {f"test{suffix[name]}": GlueFile(name, test_text or text) for name in test}
    return files


_PAIR = ("sentence1", "sentence2")
_NLI2 = ("entailment", "not_entailment")
_NLI3 = ("entailment", "neutral", "contradiction")

TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            "mnli",
            "MNLI",
            ("premise", "hypothesis"),
            _NLI3,
            ("accuracy",),
            "MNLI",
            _files(
                _PAIR,
                "gold_label",
                dev=("dev_matched.tsv", "dev_mismatched.tsv"),
                test=("test_matched.tsv", "test_mismatched.tsv"),
            ),
            selection_split="validation_matched",
            label_words=True,
        ),
        TaskSpec(
            "qnli",
            "QNLI",
            ("question", "sentence"),
            _NLI2,
            ("accuracy",),
            "QNLI",
            _files(("question", "sentence"), "label"),
            label_words=True,
        ),
        TaskSpec(
            "sst2",
            "SST-2",
            ("sentence",),
            ("negative", "positive"),
            ("accuracy",),
            "SST-2",
            _files(("sentence",), "label"),
        ),
        TaskSpec("rte", "RTE", _PAIR, _NLI2, ("accuracy",), "RTE", _files(_PAIR, "label"), label_words=True),
        TaskSpec(
            "mrpc",
            "MRPC",
            _PAIR,
            ("not_equivalent", "equivalent"),
            ("f1", "accuracy"),
            "MRPC",
            _files(("#1 String", "#2 String"), "Quality"),
        ),
        TaskSpec(
            "cola",
            "CoLA",
            ("sentence",),
            ("unacceptable", "acceptable"),
            ("matthews_correlation",),
            "CoLA",
            # Train and dev have no header: source, label, the linguists' mark, sentence.
            _files((3,), 1, test_text=("sentence",)),
        ),
        TaskSpec("stsb", "STS-B", _PAIR, (), ("spearmanr", "pearson"), "STS-B", _files(_PAIR, "score")),
        TaskSpec(
            "qqp",
            "QQP",
            ("question1", "question2"),
            ("not_duplicate", "duplicate"),
            ("f1", "accuracy"),
            "QQP",
            _files(("question1", "question2"), "is_duplicate"),
        ),
        TaskSpec(
            "wnli", "WNLI", _PAIR, ("not_entailment", "entailment"), ("accuracy",), "WNLI", _files(_PAIR, "label")
        ),
        TaskSpec(
            "ax",
            "AX",
            ("premise", "hypothesis"),
            _NLI3,
            ("matthews_correlation",),
            "diagnostic",
            {"test": GlueFile("diagnostic.tsv", _PAIR)},
            selection_split="test",
            label_words=True,
        ),
    )
}
"""Facts about each task: Wang et al., "GLUE", ICLR 2019, and the hub's ``nyu-mll/glue``."""

PAPER_TASKS = ("mnli", "qnli", "sst2", "rte", "mrpc", "cola", "stsb")
"""The seven tasks of the IsoBN paper."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns a hint such as ``" Did you mean 'isobn'?"``, empty where nothing is near."""
    matches = difflib.get_close_matches(shorten(word).lower(), list(known), n=1)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def normalize_task_name(name: str) -> str:
    """``STS-B``, ``sts_b`` and ``stsb`` are one task."""
    return str(name).strip().lower().replace("-", "").replace("_", "")


def get_task(name: str) -> TaskSpec:
    """Looks a task up; case, hyphens and underscores do not matter.

    Raises:
        ConfigError: The name is not known.
    """
    key = normalize_task_name(name)
    if key not in TASKS:
        raise ConfigError(f"unknown task '{shorten(name)}'. Known: {', '.join(TASKS)}.{nearest(key, TASKS)}")
    return TASKS[key]
