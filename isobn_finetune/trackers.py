"""Experiment trackers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from isobn_finetune.errors import ConfigError
from isobn_finetune.run_folder import RunFolder


def check_tracker(report_to: str) -> None:
    """Refuses a tracker that is not there, or that would ask for a login in the middle of a run."""
    if report_to == "none":
        return
    if importlib.util.find_spec(report_to) is None:
        raise ConfigError(f"train.report_to: package '{report_to}' is not installed; pip install {report_to}")
    offline = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (Path.home() / ".netrc").is_file()
    if report_to == "wandb" and not (offline or has_key or sys.stdin.isatty()):
        raise ConfigError(
            "train.report_to: wandb has no key and no terminal to ask on; set WANDB_API_KEY or WANDB_MODE=offline"
        )


def create_tracker_callbacks(report_to: str, folder: RunFolder) -> list[Any]:
    """Callbacks for trackers that need more than their name: TensorBoard's files go into the run folder."""
    if report_to != "tensorboard":
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return [TensorBoardCallback(SummaryWriter(str(folder.tensorboard)))]
