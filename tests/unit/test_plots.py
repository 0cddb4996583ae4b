"""Promises of isobn_finetune.plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from isobn_finetune import plots


def history(steps: int = 40, eval_steps: int = 20, splits: tuple[str, ...] = ("validation",)) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        lines.append({"event": "train", "step": step, "epoch": step / 20, "loss": 1 / step, "learning_rate": 1e-5})
        if step % eval_steps == 0:
            measures = {"ev1": 0.3, "ev2": 0.4, "ev3": 0.5 + step / 1000, "isoscore": 0.1}
            for split in splits:
                evaluation = {"event": "evaluation", "step": step, "epoch": step / 20, "split": split, "loss": 0.5}
                evaluation["metrics"] = {"spearmanr": step / 100, "pearson": 0.0}
                evaluation["isotropy"] = {"n": 8, "pooler_output": measures, "normed_output": measures | {"ev3": 0.2}}
                lines.append(evaluation)
    return lines


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Keeps figures as they are saved."""
    figures: list[Figure] = []
    save = plots.save_figure

    def keep(figure: Figure, path: Path, dpi: int = 150) -> None:
        figures.append(figure)
        save(figure, path, dpi)

    monkeypatch.setattr(plots, "save_figure", keep)
    return figures


def lines_of(figure: Figure, panel: int) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[panel].lines
    }


def test_curves_show_loss_score_and_isotropy_over_steps(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.plot_curves(history(), tmp_path / "curves.png", "a run", "spearmanr", best_step=40)
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0
    loss, score, isotropy = (lines_of(drawn[0], panel) for panel in range(3))
    assert loss["training"] == ([10, 20, 30, 40], [1 / 10, 1 / 20, 1 / 30, 1 / 40])
    assert loss["validation"] == ([20, 40], [0.5, 0.5])
    assert score["validation"] == ([20, 40], [0.2, 0.4])
    assert isotropy["pooler output (before the norm)"] == ([20, 40], [0.52, 0.54])
    assert isotropy["normed output (after it)"] == ([20, 40], [0.2, 0.2])
    assert score["best, step 40"][0] == isotropy["best, step 40"][0] == [40, 40]


def test_lines_differ_without_colour(tmp_path: Path, drawn: list[Figure]) -> None:
    splits = ("validation_matched", "validation_mismatched")
    plots.plot_curves(history(splits=splits), tmp_path / "curves.png", "a run", "spearmanr", best_step=40)
    for axes in drawn[0].axes:
        looks = [(line.get_linestyle(), line.get_marker()) for line in axes.lines]
        assert len(looks) > 1
        assert len(set(looks)) == len(looks)


def test_many_logs_are_smoothed_without_looking_ahead(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.plot_curves(history(1000, 500), tmp_path / "curves.png", "a run")
    losses = [1 / step for step in range(10, 1001, 10)]
    smoothed = lines_of(drawn[0], 0)["training (mean of 4 logs)"][1]
    np.testing.assert_allclose(smoothed[:5], [np.mean(losses[max(0, i - 3) : i + 1]) for i in range(5)])


def test_missing_values_leave_gaps_or_a_remark_and_no_warning(
    tmp_path: Path, drawn: list[Figure], recwarn: pytest.WarningsRecorder
) -> None:
    lines = history()
    lines[2]["metrics"], lines[2]["isotropy"] = {"spearmanr": None}, None
    lines[0]["loss"] = None
    plots.plot_curves(lines, tmp_path / "gaps.png", "gaps", "spearmanr")
    np.testing.assert_array_equal(lines_of(drawn[0], 1)["validation"][1], [np.nan, 0.4])

    plots.plot_curves([], tmp_path / "empty.png", "a $title$ with 字 and $", None, best_step=3)
    remarks = [text.get_text() for axes in drawn[1].axes for text in axes.texts]
    assert remarks == ["no loss logged", "no evaluation", "no isotropy measured"]
    assert (tmp_path / "empty.png").stat().st_size > 0
    assert len(recwarn) == 0


def test_figures_repeat_and_leave_nothing_else_behind(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        plots.plot_curves(history(), tmp_path / name, "a run", "spearmanr")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]
    assert dict(matplotlib.rcParams) == before


def test_a_failed_write_keeps_the_old_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "curves.png"
    plots.plot_curves(history(), path, "a run", "spearmanr")
    old = path.read_bytes()

    def fail(self: Figure, target: Path, **options: Any) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="No space"):
        plots.plot_curves(history(), path, "another", "spearmanr")
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


NORMED = {"none": np.geomspace(1, 0.01, 30), "batchnorm": np.ones(30), "isobn": np.linspace(2, 1, 30)}


def test_spreads_are_drawn_by_size_and_constant_dimensions_are_counted(tmp_path: Path, drawn: list[Figure]) -> None:
    spreads = {**NORMED, "none": np.array([0.0, 1.0, 3.0])}
    plots.plot_spreads(spreads, [tmp_path / "a.png", tmp_path / "a.svg"], "spreads")
    lines = lines_of(drawn[0], 0)
    np.testing.assert_allclose(lines["none (1 constant dimensions not drawn)"][1], [1.5, 0.5])
    np.testing.assert_allclose(lines["batchnorm"][1], 1)
    assert len({line.get_linestyle() for line in drawn[0].axes[0].lines}) == 3
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


def test_the_spectrum_marks_ev_k_of_each_norm(tmp_path: Path, drawn: list[Figure]) -> None:
    shares = {norm: np.sort(values)[::-1] / values.sum() for norm, values in NORMED.items()}
    plots.plot_spectrum(shares, [tmp_path / "a.png"], "spectrum", top_k=2)
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert labels[1] == f"batchnorm: EV$_{{2}}$ = {2 / 30:.4f}"
    assert labels[-1] == "isotropic: 1/30"


@pytest.mark.parametrize("names", [("no", "yes"), ()])
def test_components_show_each_norm_and_label_also_where_some_are_hidden(
    names: tuple[str, ...], tmp_path: Path, drawn: list[Figure]
) -> None:
    points = {norm: np.random.default_rng(0).standard_normal((6, 2)) for norm in NORMED}
    labels = np.array([0, 1, 1, np.nan, 0, 1]) if names else np.array([0.5, 1, 3, np.nan, 5, 2])
    shares = dict.fromkeys(NORMED, np.array([0.5, 0.25]))
    plots.plot_components(points, shares, labels, names, [tmp_path / "a.png"], "components")
    assert [axes.get_title() for axes in drawn[0].axes[:3]] == ["norm none", "norm batchnorm", "norm isobn"]
    assert "50.0% of the variance" in drawn[0].axes[0].get_xlabel()
    sizes = [len(collection.get_offsets()) for collection in drawn[0].axes[0].collections]
    assert sizes == ([1, 2, 3] if names else [1, 5])
    if names:
        assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["label hidden", "no", "yes"]


def test_components_bear_labels_that_are_all_hidden(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for names in (("no", "yes"), ()):
        points, shares = {"none": np.eye(2)}, {"none": np.array([0.5, 0.5])}
        plots.plot_components(points, shares, np.full(2, np.nan), names, [tmp_path / "a.png"], "hidden")
    assert len(recwarn) == 0


def test_the_correlation_matrix_is_drawn_from_zero_to_one(tmp_path: Path, drawn: list[Figure]) -> None:
    plots.plot_correlation(np.eye(3), [tmp_path / "a.png"], "correlation", "a remark")
    image = drawn[0].axes[0].images[0]
    assert image.get_clim() == (0, 1)
    np.testing.assert_array_equal(image.get_array(), np.eye(3))
    assert "a remark" in drawn[0].axes[0].get_xlabel()
