"""The README.md of a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from isobn_finetune.config import RunConfig, slugify
from isobn_finetune.run_folder import write_text

if TYPE_CHECKING:
    from isobn_finetune.results import RunResult


def write_model_card(folder: Path, config: RunConfig, result: RunResult) -> None:
    """Writes what the model is, how it scored, and how to load it."""
    spec = config.spec
    norm = ", ".join(f"{key} {value}" for key, value in result.norm.items() if key != "name")
    header = {"library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["isobn-finetune"]}
    scores = [
        f"| {split} | {name} | {'undefined' if value is None else f'{value:.4f}'} |"
        for split, values in result.metrics.items()
        for name, value in values.items()
    ]
    isotropy = result.isotropy or {}
    measures = [
        f"| {place} | "
        + " | ".join(_number(isotropy[place].get(key)) for key in ("ev1", "ev2", "ev3", "isoscore"))
        + " |"
        for place in ("pooler_output", "normed_output")
        if place in isotropy
    ]
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        "",
        f"# {spec.title}, norm {config.norm.name}",
        "",
        f"Fine-tuned from `{slugify(config.model.name)}` on {spec.title} with isobn-finetune "
        f"{result.environment.get('isobn-finetune')}, seed {config.seed}.",
        f"Norm of the pooler output: {config.norm.name}" + (f" ({norm})." if norm else "."),
        "",
        "| split | metric | score |",
        "|---|---|---|",
        *scores,
        "",
        f"Isotropy on {isotropy.get('n')} training rows:",
        "",
        "| | EV_1 | EV_2 | EV_3 | IsoScore |",
        "|---|---|---|---|---|",
        *measures,
        "",
        "```python",
        "from isobn_finetune import load_model",
        "",
        'model, tokenizer = load_model("path/to/this/folder")',
        "```",
    ]
    write_text(folder / "README.md", "\n".join(lines) + "\n")


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
