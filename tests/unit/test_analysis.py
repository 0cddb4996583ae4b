"""Promises of isobn_finetune.analysis and isobn_finetune.analyze_report, on embeddings made by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isobn_finetune import analyze_report
from isobn_finetune.analysis import Analysis, EmbeddedTask, fit_norm, measure_embeddings, order_by_clusters
from isobn_finetune.errors import ConfigError
from isobn_finetune.isotropy import explained_variance, iso_score, mean_cosine_similarity
from isobn_finetune.norms import create_norm
from isobn_finetune.tasks import get_task

NORMS = ({"name": "none"}, {"name": "batchnorm"}, {"name": "isobn"})


def draw(rows: int = 400, width: int = 8, seed: int = 0) -> np.ndarray:
    """Embeddings with two strong directions, ``(rows, width)`` float32."""
    rng = np.random.default_rng(seed)
    strong = rng.standard_normal((rows, 2)) @ rng.standard_normal((2, width))
    noise = rng.standard_normal((rows, width)) * np.geomspace(1, 0.05, width)
    return (strong + 0.3 * noise + 0.5).astype(np.float32)


def measure(embeddings: np.ndarray, task: str = "rte", representation: str = "pooler", **options: Any) -> EmbeddedTask:
    labels = np.arange(len(embeddings)) % 2
    return measure_embeddings(get_task(task), representation, embeddings, labels, NORMS, **options)


def analysis_of(*tasks: EmbeddedTask, **options: Any) -> Analysis:
    return Analysis("org/model", "train", "demo", 3, options.pop("compare_to", None), list(tasks))


def strict(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not strict JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", ["none", "batchnorm", "isobn"])
def test_measures_after_a_norm_are_those_of_its_output(name: str) -> None:
    embeddings = draw()
    norm: Any = create_norm(name, 8, **({} if name == "none" else {"momentum": 1.0}))
    with torch.no_grad():
        norm.train()(torch.from_numpy(embeddings))
        normed = norm.eval()(torch.from_numpy(embeddings))
    measures = measure(embeddings).norms[name].measures
    np.testing.assert_allclose([measures[f"ev{k}"] for k in (1, 2, 3)], explained_variance(normed), atol=1e-6)
    assert measures["isoscore"] == pytest.approx(iso_score(normed), abs=1e-6)
    assert measures["mean_cosine"] == pytest.approx(mean_cosine_similarity(normed), abs=1e-6)
    assert measures["n"] == 400


def test_batchnorm_statistics_are_those_of_exactly_these_rows() -> None:
    embeddings = draw()
    weight, shift = fit_norm({"name": "batchnorm"}, embeddings).affine()
    np.testing.assert_allclose(weight, 1 / np.sqrt(embeddings.var(axis=0, ddof=1) + 1e-5), rtol=1e-5)
    np.testing.assert_allclose(shift, -embeddings.mean(axis=0) * weight.numpy(), rtol=1e-4, atol=1e-5)


def test_options_of_a_norm_reach_it() -> None:
    identity = fit_norm({"name": "isobn", "beta": 0.0, "eps": 1e-9}, draw()).affine()[0]
    np.testing.assert_allclose(identity, 1, rtol=1e-5)


def test_a_trained_norm_is_measured_as_it_stands() -> None:
    embeddings = draw()
    norm: Any = create_norm("batchnorm", 8).eval()
    with torch.no_grad():
        norm.weight[:] = torch.tensor([1.0] + [0.0] * 7)
    task = measure(embeddings, trained=({"name": "batchnorm"}, norm))
    assert list(task.norms) == ["none", "batchnorm", "isobn", "trained"]
    assert task.norms["trained"].measures["ev1"] == pytest.approx(1)
    assert any("Norm trained raises EV_3" in note for note in task.notes)


def test_the_main_representation_stands_at_the_top_of_the_json() -> None:
    pooler, cls = measure(draw()), measure(draw(seed=1), representation="cls")
    result = strict(json.dumps(analysis_of(pooler, cls).to_json()))
    assert list(result) == ["rte"]
    entry = result["rte"]["isobn"]
    assert entry["ev3"] == entry["representations"]["pooler"]["ev3"] != entry["representations"]["cls"]["ev3"]
    assert {"n", "ev1", "ev2", "ev3", "isoscore"} < set(entry)
    assert (entry["n"], entry["representation"], entry["norm"]["name"]) == (400, "pooler", "isobn")


def test_several_tasks_are_averaged_last() -> None:
    first, second = measure(draw()), measure(draw(200, seed=1), "cola")
    analysis = analysis_of(first, second)
    result = analysis.to_json()
    assert list(result) == ["rte", "cola", "average"]
    mean = (first.norms["isobn"].measures["ev3"] + second.norms["isobn"].measures["ev3"]) / 2
    assert result["average"]["isobn"]["ev3"] == pytest.approx(mean)
    assert result["average"]["isobn"]["n"] == 600

    rows = list(csv.DictReader(io.StringIO(analyze_report.create_csv(analysis))))
    assert [(row["task"], row["norm"]) for row in rows] == [
        (task, norm) for task in ("rte", "cola", "average") for norm in ("none", "batchnorm", "isobn")
    ]
    assert float(rows[-1]["ev3"]) == mean
    table = analyze_report.create_tables(analysis)[0]
    assert [row[0] for row in table.rows] == ["RTE", "CoLA", "average"]
    assert table.rows[-1][-1] == f"{mean:.4f}"


def test_the_terminal_table_is_aligned_with_norms_over_their_columns() -> None:
    lines = analyze_report.create_tables(analysis_of(measure(draw())))[0].to_text().split("\n")
    assert "pooler output, org/model, split train" in lines[0]
    groups, header, row = lines[2:5]
    assert groups.split() == ["none", "batchnorm", "isobn"]
    assert header.split() == ["task", "n", *["EV_1", "EV_2", "EV_3"] * 3]
    assert len(header) == len(row)
    assert header.index("EV_1") > groups.index("none") >= len("task  n")
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize(("rows", "warned"), [(39, True), (40, False)])
def test_few_rows_are_warned_of(rows: int, warned: bool) -> None:
    assert any("fewer than 5 x 8" in note for note in measure(draw(rows)).notes) is warned


def test_notes_say_how_much_room_there_is_and_what_limits_isobn() -> None:
    rng = np.random.default_rng(0)
    isotropic = (rng.standard_normal((2000, 64)) * 1e-3).astype(np.float32)
    notes = " ".join(measure(isotropic).notes)
    assert "already near-isotropic; expect little from IsoBN" in notes
    assert "eps, not beta, limits it here" in notes
    strong = " ".join(measure(draw()).notes)
    assert "strongly anisotropic" in strong
    assert "eps, not beta" not in strong


@pytest.mark.parametrize("rows", ["one", "equal", "not finite"])
def test_undefined_embeddings_give_files_with_nulls_and_the_reason(
    rows: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    embeddings = {
        "one": np.ones((1, 4), dtype=np.float32),
        "equal": np.ones((9, 4), dtype=np.float32),
        "not finite": np.full((9, 4), np.nan, dtype=np.float32),
    }[rows]
    analysis = analysis_of(measure(embeddings))
    analyze_report.write_analysis(analysis, tmp_path)
    entry = strict((tmp_path / "analyze.json").read_text())["rte"]["isobn"]
    assert entry["ev3"] is None
    assert entry["isoscore"] is None
    assert entry["reason"]
    assert "No measure is defined" in analyze_report.format_analysis(analysis)
    for kind in ("csv", "md", "html"):
        assert "nan" not in (tmp_path / f"analyze.{kind}").read_text().lower()
    assert not (tmp_path / "plots").exists()
    assert len(recwarn) == 0


def test_rows_that_are_not_finite_are_left_out_and_said() -> None:
    embeddings = draw()
    spoilt = np.insert(embeddings, 7, np.nan, axis=0)
    labels = np.insert(np.arange(400) % 2, 7, 1)
    task = measure_embeddings(get_task("rte"), "pooler", spoilt, labels, NORMS)
    clean = measure(embeddings)
    assert task.norms["isobn"].measures["ev3"] == clean.norms["isobn"].measures["ev3"]
    np.testing.assert_array_equal(task.labels, clean.labels)
    assert any("1 rows gave values that are not finite" in note for note in task.notes)


def test_a_constant_dimension_spoils_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    embeddings = draw()
    embeddings[:, 3] = 0.25
    analysis = analysis_of(measure(embeddings))
    written = analyze_report.write_analysis(analysis, tmp_path)
    entry = strict((tmp_path / "analyze.json").read_text())["rte"]["isobn"]
    assert entry["ev1"] is not None
    assert "reason" not in entry
    assert len([path for path in written if path.suffix == ".png"]) == 4
    assert len(recwarn) == 0


def test_written_files_are_complete_and_the_page_needs_no_other(tmp_path: Path) -> None:
    analyze_report.write_analysis(analysis_of(measure(draw()), measure(draw(seed=1), "stsb")), tmp_path)
    kinds = ("components", "correlation", "spectrum", "spreads")
    expected = [f"{task}_pooler_{kind}.{end}" for task in ("rte", "stsb") for kind in kinds for end in ("png", "svg")]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "analyze.csv",
        "analyze.html",
        "analyze.json",
        "analyze.md",
        "plots",
    ]
    page = (tmp_path / "analyze.html").read_text()
    assert page.count("data:image/png;base64,") == 8
    assert "://" not in page
    assert "src=" not in page.replace('src="data:image/png;base64,', "")
    markdown = (tmp_path / "analyze.md").read_text()
    assert "plots/rte_pooler_spectrum.png" in markdown


def test_names_cannot_break_out_of_the_page_or_the_tables(tmp_path: Path) -> None:
    analysis = analysis_of(measure(draw()))
    analysis.model = '<script>alert("x")</script>|$x_1$'
    analyze_report.write_analysis(analysis, tmp_path)
    page = (tmp_path / "analyze.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    table = [line for line in (tmp_path / "analyze.md").read_text().split("\n") if line.startswith("| RTE")]
    assert len(table) == 4


def test_a_comparison_says_which_space_is_more_elongated() -> None:
    from isobn_finetune.analysis import note_comparison

    task = measure(draw())
    task.compared = {**task.norms["none"].measures, "ev3": 0.4}
    assert "more elongated than that of base: EV_3 0." in note_comparison(task, "base")[0]
    analysis = analysis_of(task, compare_to="base")
    assert analysis.to_json()["rte"]["none"]["representations"]["pooler"]["compared"]["model"] == "base"
    table = analyze_report.create_tables(analysis)[-1]
    assert table.rows[0][3] == "0.4000"
    assert "base" in table.to_text()


def test_an_unwritable_folder_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write here"):
        analyze_report.write_analysis(analysis_of(measure(draw())), tmp_path)


def test_like_dimensions_stand_side_by_side_after_clustering() -> None:
    blocks = np.kron(np.eye(3), np.full((4, 4), 0.9))
    np.fill_diagonal(blocks, 1)
    order = np.random.default_rng(0).permutation(12)
    shuffled = blocks[np.ix_(order, order)]
    np.testing.assert_array_equal(order_by_clusters(shuffled), blocks)
