from __future__ import annotations

from pathlib import Path

import pytest

from isobn_finetune.data import load_splits
from isobn_finetune.errors import ConfigError
from isobn_finetune.metrics import METRICS
from isobn_finetune.tasks import PAPER_TASKS, TASKS, get_task


def test_the_tasks_are_those_of_the_contract() -> None:
    assert set(TASKS) >= {"mnli", "qnli", "sst2", "rte", "mrpc", "cola", "stsb", "qqp", "wnli", "ax"}
    assert PAPER_TASKS == ("mnli", "qnli", "sst2", "rte", "mrpc", "cola", "stsb")


@pytest.mark.parametrize(
    ("task", "metrics", "split"),
    [
        ("mnli", ("accuracy",), "validation_matched"),
        ("qnli", ("accuracy",), "validation"),
        ("sst2", ("accuracy",), "validation"),
        ("rte", ("accuracy",), "validation"),
        ("wnli", ("accuracy",), "validation"),
        ("mrpc", ("f1", "accuracy"), "validation"),
        ("qqp", ("f1", "accuracy"), "validation"),
        ("cola", ("matthews_correlation",), "validation"),
        ("stsb", ("spearmanr", "pearson"), "validation"),
    ],
)
def test_metrics_and_selection_splits_are_those_of_the_contract(
    task: str, metrics: tuple[str, ...], split: str
) -> None:
    spec = TASKS[task]
    assert spec.metrics == metrics and spec.primary_metric == metrics[0] and spec.selection_split == split
    assert set(metrics) <= set(METRICS)


def test_labels_stand_in_the_order_of_the_hub() -> None:
    assert TASKS["mnli"].labels == ("entailment", "neutral", "contradiction")
    assert TASKS["rte"].labels == TASKS["qnli"].labels == ("entailment", "not_entailment")
    assert TASKS["wnli"].labels == ("not_entailment", "entailment")
    assert TASKS["cola"].labels == ("unacceptable", "acceptable")
    assert TASKS["stsb"].is_regression and TASKS["stsb"].num_labels == 1


@pytest.mark.parametrize("given_name", ["MNLI", "mnli", "SST-2", "sst2", "STS-B", "stsb", "sts_b", " RTE "])
def test_case_and_hyphens_of_a_task_do_not_matter(given_name: str) -> None:
    assert get_task(given_name).name == given_name.strip().lower().replace("-", "").replace("_", "")


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown task 'mnlli'\. Known: mnli, qnli.*Did you mean 'mnli'\?"):
        get_task("mnlli")


@pytest.mark.parametrize("task", [name for name in TASKS if "train" in TASKS[name].files])
def test_every_task_has_eight_invented_rows(task: str, glue_dir: Path) -> None:
    splits = load_splits(TASKS[task], str(glue_dir))
    assert set(splits) == set(TASKS[task].splits)
    for name, rows in splits.items():
        assert len(rows) == (4 if name.startswith("test") else 8)
        hidden = name.startswith("test")
        assert all((label == -1) == hidden for label in rows["label"])
        assert all(all(text.strip() for text in rows[column]) for column in TASKS[task].text_columns)
