"""The folder of one run: what stands where, and how files get there whole."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from isobn_finetune.config import RunConfig, create_run_config, flatten, load_yaml
from isobn_finetune.errors import ConfigError, DataError, shorten
from isobn_finetune.whole_files import open_whole

logger = logging.getLogger(__name__)

IDENTITY = ("task", "model", "norm", "seed", "data")
"""What makes a run another run, so that ``--resume`` refuses a change."""

HARMLESS = ("output_dir", "train.eval_batch_size", "train.logging_steps", "train.save_total_limit", "train.report_to")
"""What may change when a run goes on."""


class RunFolder:
    """Paths and files of one run; the layout is fixed, people script against it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.result = self.path / "result.json"
        self.history = self.path / "history.jsonl"
        self.predictions = self.path / "predictions"
        self.curves = self.path / "curves.png"
        self.model = self.path / "model"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"  # where train.report_to asks for it

    def read_result(self) -> dict[str, Any] | None:
        """Reads ``result.json``; ``None`` where the run is not over.

        Raises:
            DataError: The file is cut short or edited.
        """
        if not self.result.exists():
            return None
        try:
            result = json.loads(self.result.read_text(encoding="utf-8"))
            if not isinstance(result["status"], str):
                raise TypeError
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(f"{self.result}: not a whole result file; --overwrite starts afresh") from None
        return result

    def describe(self) -> str:
        """What is here, in words: ``a finished run (rte, isobn, seed 1)``."""
        result = self.read_result()
        kind = f"a {result['status']} run" if result else "a run that is not over"
        try:
            config = create_run_config(load_yaml(self.config), str(self.config))
        except ConfigError:
            return kind
        return f"{kind} ({config.task}, {config.model.name}, norm {config.norm.name}, seed {config.seed})"

    def is_occupied(self) -> bool:
        """True where anything of a run stands here."""
        return self.config.exists() or self.result.exists() or self.checkpoints.exists()

    def check_usable(self) -> None:
        """Finds out before any work whether the folder can be written.

        Raises:
            ConfigError: A file stands in the way, or there is no permission.
        """
        existing = self.path
        try:
            os.fsencode(existing)  # a lone surrogate
            if "\0" in str(existing):
                raise ValueError("no path holds a NUL")
            while not existing.exists() and existing != existing.parent:
                existing = existing.parent
        except (OSError, ValueError) as error:  # too long
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--output-dir {shorten(str(self.path))}: {reason}; choose another") from None
        if not existing.is_dir():
            raise ConfigError(
                f"{self.path}: {existing} is a file, so no folder can be made here; choose another --output-dir"
            )
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.path}: no permission to write into {existing}; choose another --output-dir")

    def differences(self, config: RunConfig, everything: bool = False) -> list[str]:
        """Lists what differs between the config here and the given one: ``seed: 1 here, 2 asked for``.

        Args:
            config: What is asked for.
            everything: Compare all that changes results, not only what makes it another run.
        """
        here = flatten(create_run_config(load_yaml(self.config), str(self.config)).model_dump())
        asked = flatten(config.model_dump())
        lines = []
        for key in dict.fromkeys((*here, *asked)):
            identity = key.partition(".")[0] in IDENTITY
            if here.get(key) != asked.get(key) and key not in HARMLESS and (identity or everything):
                lines.append(f"{key}: {here.get(key)} here, {asked.get(key)} asked for")
        return lines

    def start(self, config: RunConfig) -> None:
        """Makes the folder and writes ``config.yaml``.

        Raises:
            ConfigError: The folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
            write_text(self.config, text)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot write here ({error.strerror}); choose another --output-dir"
            ) from None

    def clear(self) -> None:
        """Removes what a run wrote, and nothing else."""
        files = (self.result, self.config, self.history, self.curves)
        for path in (*files, self.checkpoints, self.predictions, self.model, self.tensorboard):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def find_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole; newer ones, left by a kill in the middle of saving, are named."""
        by_step = {
            int(path.name.rpartition("-")[2]): path
            for path in self.checkpoints.glob("checkpoint-*")
            if path.name.rpartition("-")[2].isdigit()
        }
        for step in sorted(by_step, reverse=True):
            problem = _find_damage(by_step[step], step)
            if problem is None:
                return by_step[step]
            logger.warning("%s is not whole (%s); an earlier checkpoint is taken.", by_step[step], problem)
        return None

    def append_history(self, line: Mapping[str, Any]) -> None:
        """Adds one line to ``history.jsonl``."""
        with self.history.open("a", encoding="utf-8") as file:
            file.write(dump_json(line) + "\n")

    def read_history(self) -> list[dict[str, Any]]:
        """Reads ``history.jsonl``; a last line cut short is left out."""
        lines: list[dict[str, Any]] = []
        if self.history.is_file():
            for text in self.history.read_text(encoding="utf-8").split("\n"):
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict) and "step" in line:
                    lines.append(line)
        return lines

    def cut_history(self, step: int) -> None:
        """Forgets lines after ``step``, so that a resumed run writes no step twice."""
        kept = [line for line in self.read_history() if line["step"] <= step]
        write_text(self.history, "".join(dump_json(line) + "\n" for line in kept))


def _find_damage(checkpoint: Path, step: int) -> str | None:
    """Says what is wrong with a checkpoint, ``None`` where it is whole."""
    from safetensors import SafetensorError, safe_open

    state, weights = checkpoint / "trainer_state.json", checkpoint / "model.safetensors"
    try:
        if json.loads(state.read_text(encoding="utf-8"))["global_step"] != step:
            return f"{state.name} is of another step"
        with safe_open(weights, "np"):  # reads the header and compares sizes
            pass
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return f"{type(error).__name__} in trainer_state.json or model.safetensors"
    for name in ("optimizer.pt", "scheduler.pt"):  # torch writes zip files, whose directory stands at the end
        if not zipfile.is_zipfile(checkpoint / name):
            return f"{name} is cut short or missing"
    return None


def to_strict(value: Any) -> Any:
    """Replaces numbers that strict JSON does not know by ``None``, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): to_strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_strict(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def dump_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON text: no NaN, no infinity."""
    return json.dumps(to_strict(value), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON, whole or not at all."""
    write_text(path, dump_json(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with open_whole(path, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def replace_folder(path: Path, fill: Any) -> None:
    """Fills a folder under a temporary name by ``fill(folder)``, then puts it in the place of ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        fill(temporary)
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
