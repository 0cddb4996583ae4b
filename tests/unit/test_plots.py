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

    def keep(figure: Figure, path: Path) -> None:
        figures.append(figure)
        save(figure, path)

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
