"""The demo corpus: seven tasks in GLUE's form, written by one small grammar, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from isobn_finetune.demo.draw import Draw
from isobn_finetune.demo.pairs import (
    create_entailment_pair,
    create_inference_pair,
    create_paraphrase_pair,
    create_question_pair,
    create_similarity_pair,
)
from isobn_finetune.demo.singles import create_acceptability, create_sentiment
from isobn_finetune.errors import ConfigError
from isobn_finetune.tasks import HIDDEN_LABEL, PAPER_TASKS, get_task

DEMO_TASKS = PAPER_TASKS
"""The tasks that the demo corpus has."""


@dataclass(frozen=True)
class _Recipe:
    """How one task is written: its maker, the genres it draws from, and the rows of each split."""

    create: Callable[[Draw, str], tuple[Any, ...]]
    genres: tuple[str, ...]
    train: int
    validation: int = 400
    test: int = 300

    def rows(self, split: str) -> int:
        return {"train": self.train, "validation": self.validation, "test": self.test}[split.partition("_")[0]]


_RECIPES = {
    "mnli": _Recipe(create_inference_pair, ("home",), 4000),
    "qnli": _Recipe(create_question_pair, ("home", "work"), 4000),
    "sst2": _Recipe(create_sentiment, ("home",), 3000),
    "rte": _Recipe(create_entailment_pair, ("home", "work"), 3000),
    "mrpc": _Recipe(create_paraphrase_pair, ("home", "work"), 3000),
    "cola": _Recipe(create_acceptability, ("home", "work"), 3000),
    "stsb": _Recipe(create_similarity_pair, ("home", "work"), 3000),
}


def _genres(recipe: _Recipe, split: str) -> tuple[str, ...]:
    """As in MNLI, a mismatched split comes from a genre that training never shows."""
    return ("work",) if split.endswith("_mismatched") else recipe.genres


@lru_cache(maxsize=len(_RECIPES))
def _create_task(name: str) -> dict[str, list[tuple[Any, ...]]]:
    """All splits of a task, as tuples of the texts and the true label; no text occurs twice."""
    recipe = _RECIPES[name]
    draw = Draw(f"demo corpus 1, {name}")
    seen: set[frozenset[str]] = set()
    splits: dict[str, list[tuple[Any, ...]]] = {}
    for split in get_task(name).splits:
        rows: list[tuple[Any, ...]] = []
        while len(rows) < recipe.rows(split):
            row = recipe.create(draw, draw.one(_genres(recipe, split)))
            # A pair turned round counts as the same, and the case of letters does not matter. A sentence is not
            # paired with itself.
            key = frozenset(text.lower() for text in row[:-1])
            if key not in seen and len(key) == len(row) - 1:
                seen.add(key)
                rows.append(row)
        splits[split] = rows
    return splits


def load_demo_rows(task_name: str, split: str) -> list[dict[str, Any]]:
    """Rows of one split of the demo corpus.

    Args:
        task_name: One of ``DEMO_TASKS``, in any spelling that ``get_task`` knows.
        split: One of the task's splits.

    Returns:
        One dict a row: the task's text columns, ``label`` (position in the task's ``labels``, or a score from 0 to 5;
        -1 where hidden, as in the test splits) and ``idx``, counted from 0.

    Raises:
        ConfigError: The corpus has no such task, or the task no such split.
    """
    spec = get_task(task_name)
    if spec.name not in _RECIPES:
        raise ConfigError(
            f"the demo corpus has no task '{spec.name}'. It has: {', '.join(DEMO_TASKS)}. "
            "Choose one of them, or other data with --data."
        )
    if split not in spec.splits:
        raise ConfigError(f"task '{spec.name}' has no split '{split}'. It has: {', '.join(spec.splits)}.")
    as_label = float if spec.is_regression else int
    hidden = split.startswith("test")
    return [
        {
            **dict(zip(spec.text_columns, texts, strict=True)),
            "label": as_label(HIDDEN_LABEL if hidden else label),
            "idx": index,
        }
        for index, (*texts, label) in enumerate(_create_task(spec.name)[split])
    ]
