"""Files that appear whole or not at all, however large: written beside their place, then renamed."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from isobn_finetune.errors import ConfigError, InterruptedRunError


@contextmanager
def open_whole(path: Path, mode: str, **options: Any) -> Iterator[IO[Any]]:
    """Opens a file for writing; it takes its place when the block ends without an exception.

    Args:
        path: Its place; missing folders above it are made.
        mode: ``w`` or ``wb``.
        **options: As for ``open``.

    Raises:
        OSError: It cannot be written; names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; results are as readable as the user's umask says.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it has no room for
        raise


def check_writable(path: Path, option: str) -> None:
    """Finds out before any work whether a file can be written.

    Args:
        path: The file.
        option: Which named it, for the message.

    Raises:
        ConfigError: It is a folder, or its folder cannot be made or written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: a folder. Name a file.")
    existing = path.parent
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{option} {path}: {existing} is a file, so no file can be made in it; choose another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: no permission to write into {existing}; choose another place")


@contextmanager
def clean_interrupt() -> Iterator[None]:
    """Lets SIGTERM end the work as Ctrl-C does, so that temporary files go, and says so in one line.

    Raises:
        InterruptedRunError: In place of KeyboardInterrupt.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, where signals cannot be taken
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted; no file was left half-written") from None
    finally:
        signal.signal(signal.SIGTERM, previous)
