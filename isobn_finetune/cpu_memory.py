"""Keeps the C library from giving memory back to the system between training steps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Numbers and defaults of glibc's mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _TOP_PAD: 128 * 1024, _MMAP_THRESHOLD: 128 * 1024}
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20, _MMAP_THRESHOLD: 2**30}


@contextmanager
def keep_freed_memory() -> Iterator[bool]:
    """While it lasts, freed memory stays with the process; yields whether the C library can do that.

    A training step frees all its gradients and activations. Given back, each of their pages is mapped and cleared
    anew at the next step: ten thousand page faults, a fifth of a short step on a CPU.
    """
    mallopt = _find_mallopt()
    if mallopt is None:
        yield False
        return
    for parameter, value in _KEEPING.items():
        mallopt(parameter, value)
    try:
        yield True
    finally:
        for parameter, value in _DEFAULTS.items():
            mallopt(parameter, value)


def _find_mallopt() -> Any:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
