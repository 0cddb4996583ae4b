"""Random draws that are the same on every machine and in every Python version."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """A seeded source of choices.

    Only ``random.Random.random`` is used: Python promises its sequence for an integer seed, but not how ``choice`` or
    ``shuffle`` use it.

    Args:
        key: Any text; equal texts give equal draws.
    """

    def __init__(self, key: str) -> None:
        """See the class."""
        digest = hashlib.sha256(key.encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big"))

    def below(self, count: int) -> int:
        """A whole number from 0 up to, but not including, ``count``."""
        return int(self._random.random() * count)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._random.random() < probability

    def one(self, items: Sequence[T]) -> T:
        """One of the items, each as likely."""
        return items[self.below(len(items))]

    def weighted(self, items: Sequence[tuple[T, float]]) -> T:
        """One of the items, in proportion to the weight beside it."""
        mark = self._random.random() * sum(weight for _, weight in items)
        for item, weight in items:
            mark -= weight
            if mark < 0:
                return item
        return items[-1][0]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in a random order (Fisher and Yates)."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result
