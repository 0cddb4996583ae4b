from __future__ import annotations

from pathlib import Path

import pytest

from isobn_finetune.run_folder import RunFolder
from isobn_finetune.trackers import create_tracker_callbacks


def test_no_tracker_needs_no_callback(tmp_path: Path) -> None:
    assert create_tracker_callbacks("none", RunFolder(tmp_path)) == []
    assert create_tracker_callbacks("wandb", RunFolder(tmp_path)) == []  # the Trainer makes its own


def test_tensorboard_writes_into_the_run_folder_and_overwrite_removes_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = RunFolder(tmp_path)
    (callback,) = create_tracker_callbacks("tensorboard", folder)
    callback.tb_writer.close()
    assert list(folder.tensorboard.glob("events.out.tfevents.*"))
    folder.clear()
    assert not folder.tensorboard.exists()
