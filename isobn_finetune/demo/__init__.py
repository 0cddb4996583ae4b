"""What ships with the package so that it can be tried without a network: a generated corpus and a small encoder."""

from __future__ import annotations

from pathlib import Path

from isobn_finetune.demo.corpus import DEMO_TASKS, load_demo_rows

__all__ = ["DEMO_TASKS", "load_demo_rows", "tiny_model_dir"]


def tiny_model_dir() -> Path:
    """Folder of ``tiny``, the small pre-trained BERT and its tokenizer, as ``save_pretrained`` writes them."""
    return Path(__file__).parent / "tiny"
