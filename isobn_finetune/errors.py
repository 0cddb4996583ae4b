"""Errors that the command line prints as one plain line; each knows its exit code."""

from __future__ import annotations

import reprlib
from typing import Any


class IsobnError(Exception):
    """Base of the errors that a user can mend. Exit code 1: the work had begun and failed."""

    exit_code = 1


class ConfigError(IsobnError):
    """Options, config, model, data folder or output folder cannot be used: nothing was started. Exit code 2."""

    exit_code = 2


class DataError(IsobnError):
    """A bad row inside the data, named by file and row. Exit code 1."""


class DivergedError(IsobnError):
    """Loss, gradient or weights are no longer finite. Exit code 1; the run's status is ``diverged``."""


class InterruptedRunError(IsobnError):
    """The user or the batch system asked the run to end; a checkpoint was saved. Exit code 130."""

    exit_code = 130


def shorten(value: Any, limit: int = 80) -> str:
    """A value for a message: one line, and never long, however deep a file nests it."""
    # Its own limits, since a few lines of YAML aliases may stand for more than memory holds.
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
