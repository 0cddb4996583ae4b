"""What the commands share."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def quiet_libraries() -> None:
    """Keeps the libraries' own chatter off the terminal; set before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
