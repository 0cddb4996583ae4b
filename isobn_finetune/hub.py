"""GLUE and models from the Hugging Face hub: what the cache holds is taken from there, the rest is fetched once.

The client asks the hub even for what it has, and with the hub out of reach it waits and asks again for half a
minute. So the cache comes first here, with no connection at all, and models are handed on as local folders.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from isobn_finetune.errors import ConfigError
from isobn_finetune.readers import Columns, columns_from_table
from isobn_finetune.tasks import TaskSpec

logger = logging.getLogger(__name__)

GLUE_DATASET = "nyu-mll/glue"
TINY = "tiny"

_T = TypeVar("_T")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", re.ASCII)
_WAITS = (1.0, 3.0)
"""Seconds between the tries of a request that failed for a reason that may pass."""
_TIMEOUT = 10.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights that we load, the best first."""
_TOKENIZER_FILES = (
    ("tokenizer.json",),
    ("vocab.txt",),
    ("vocab.json", "merges.txt"),
    ("spm.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)
"""Sets of files of which one suffices for a tokenizer."""
_TOKENIZER_AND_CODE = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "bpe.codes",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.py",
)


def load_hub_splits(spec: TaskSpec, wanted: Sequence[str], needed: Collection[str]) -> dict[str, Columns]:
    """Loads splits of a GLUE task from the hub's ``nyu-mll/glue``.

    Args:
        spec: The task.
        wanted: Splits to load where they exist.
        needed: Those of them that must exist.

    Raises:
        ConfigError: Not in the cache and not to be had from the hub, or a needed split is missing.
        DataError: A bad row, named by split and row.
    """
    splits = _load_cached_glue(spec.name)
    if splits is None:
        splits = _download_glue(spec.name)
    where = f"{GLUE_DATASET} {spec.name}"
    for split in wanted:
        if split in needed and split not in splits:
            raise ConfigError(f"--data hub: {where} has no split '{split}'. Splits there: {', '.join(splits)}.")
    columns = {}
    for split in wanted:
        if split in splits:
            dataset = splits[split]
            names = getattr(dataset.features.get("label"), "names", None)
            labelled = spec.files[split].label is not None
            table = dataset.with_format("arrow")[:]
            columns[split] = columns_from_table(table, names, spec, labelled, f"{where}, split {split}")
    return columns


def _load_cached_glue(config_name: str) -> Any | None:
    """The prepared data set from the cache of `datasets`, ``None`` where it is not there whole."""
    with _quiet_offline():
        try:
            return _load_glue(config_name)
        except Exception as error:  # whatever is wrong with the cache, the hub's copy replaces it
            logger.debug("%s %s is not in the cache: %s", GLUE_DATASET, config_name, error)
            return None


def _load_glue(config_name: str) -> Any:
    from datasets import load_dataset

    # A folder of that name in the working directory would be read in place of the data set.
    path = f"hf://datasets/{GLUE_DATASET}" if Path(GLUE_DATASET).exists() else GLUE_DATASET
    return load_dataset(path, config_name)


def _download_glue(config_name: str) -> Any:
    from huggingface_hub import HfApi

    what = f"--data hub: {GLUE_DATASET} {config_name} is"
    remedy = "use --data FOLDER or --data demo"
    # One quick question first: `load_dataset` asks six times before it says that nobody answers.
    _try_online(lambda: HfApi().dataset_info(GLUE_DATASET, timeout=_TIMEOUT), what, remedy)
    return _try_online(lambda: _load_glue(config_name), what, remedy)


def resolve_model(name: str) -> Path:
    """Turns what the user calls a model into a local folder with config, weights and tokenizer.

    Args:
        name: ``tiny``, a model folder, a run folder (its ``model/`` is meant), or a hub id.

    Returns:
        A folder to be loaded with ``local_files_only=True``.

    Raises:
        ConfigError: There is no such model, it is incomplete, or it cannot be fetched.
    """
    if name == TINY:
        from isobn_finetune.demo import tiny_model_dir

        return Path(tiny_model_dir())
    folder = Path(os.path.expanduser(name))
    local_problem = "no such folder"
    if name and os.path.isdir(folder):
        model = folder
        if not (folder / _CONFIG).exists() and any((folder / file).exists() for file in ("result.json", "config.yaml")):
            model = folder / "model"
        if (model / _CONFIG).exists():
            return _check_model(name, model)
        local_problem = f"{model / _CONFIG} is missing"
    elif name and os.path.isfile(folder):
        local_problem = "a file, not a folder"
    if not _is_repo_id(name) or os.path.isfile(folder):
        raise ConfigError(f"--model '{name}': {local_problem}. Give 'tiny', a folder with a model, or a hub id.")
    # A folder without a model, say the output of an earlier run, does not hide the hub's model of that name.
    return _check_model(name, _cached_model(name) or _download_model(name, local_problem))


def _is_repo_id(name: str) -> bool:
    return _REPO_ID.fullmatch(name) is not None and ".." not in name and "--" not in name and len(name) <= 96


def _check_model(name: str, folder: Path) -> Path:
    """Finds what cannot be loaded before anything else is done; returns the folder."""
    if missing := find_missing_file(folder):
        raise ConfigError(f"--model {name}: {folder / missing} is missing. Save model and tokenizer into one folder.")
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {folder / _CONFIG} cannot be read ({_one_line(error)}).") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: {folder / _CONFIG} is no transformers config. Give a transformers model.")
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, "np"):  # reads the header and compares sizes, so it finds a file cut short
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--model {name}: {path} cannot be read ({_one_line(error)}).") from error
    return folder


def find_missing_file(folder: Path) -> str | None:
    """Names the first file that a model folder lacks, ``None`` where config, weights and tokenizer are there."""
    if not (folder / _CONFIG).exists():
        return _CONFIG
    weights = next((file for file in _WEIGHTS if (folder / file).exists()), None)
    if weights is None:
        return _WEIGHTS[0]
    if weights.endswith(".index.json"):
        try:
            shards = set(json.loads((folder / weights).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return weights
        for shard in sorted(shards):
            if not (folder / shard).exists():
                return shard
    if not any(all((folder / file).exists() for file in files) for files in _TOKENIZER_FILES):
        return _TOKENIZER_FILES[0][0]
    return None


def _cached_model(name: str) -> Path | None:
    """The cached snapshot of the main branch, ``None`` unless it is whole."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, _CONFIG)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    missing = find_missing_file(folder)
    if missing:
        logger.debug("%s in the cache lacks %s.", name, missing)
    return None if missing else folder


def _download_model(name: str, local_problem: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    what = f"--model {name}: {local_problem};"
    remedy = "use --model FOLDER or --model tiny"
    info = _try_online(lambda: HfApi().model_info(name, timeout=_TIMEOUT), what, remedy)
    files = {sibling.rfilename for sibling in info.siblings or ()}
    weights = next((file for file in _WEIGHTS if file in files), None)
    if weights is None or _CONFIG not in files:
        lacks = _CONFIG if _CONFIG not in files else f"{_WEIGHTS[0]} and {_WEIGHTS[2]}"
        raise ConfigError(f"--model {name}: the hub's copy lacks {lacks}. Choose a PyTorch model of transformers.")
    patterns = [_CONFIG, weights, *_TOKENIZER_AND_CODE]
    if weights.endswith(".index.json"):
        stem, _, suffix = weights.removesuffix(".index.json").rpartition(".")
        patterns.append(f"{stem}-*.{suffix}")
    folder = Path(_try_online(lambda: snapshot_download(name, allow_patterns=patterns), what, remedy))
    if missing := find_missing_file(folder):
        raise ConfigError(f"--model {name}: the hub's copy lacks {missing}. Choose a model that has a tokenizer.")
    return folder


def _try_online(action: Callable[[], _T], what: str, remedy: str) -> _T:
    """Runs a request to the hub, again a few times where the reason may pass.

    Args:
        action: The request.
        what: Begins the error message: option, value and what is asked for.
        remedy: Ends it: what to do instead.
    """
    from huggingface_hub import constants

    for wait in (*_WAITS, None):
        try:
            with _quiet():
                return action()
        except Exception as error:  # the client raises its HTTP library's errors too, and changes that library
            problem = _explain(error, constants.ENDPOINT)
            if wait is None or not problem.may_pass:
                raise ConfigError(f"{what} {problem.text}, or {remedy}.") from error
            logger.warning("%s does not serve this time (%s); trying again.", constants.ENDPOINT, problem.reason)
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


@dataclass(frozen=True)
class _Problem:
    """Why a request failed: the words for the user, the bare reason, and whether another try may help."""

    text: str
    reason: str = ""
    may_pass: bool = False


def _explain(error: BaseException, endpoint: str) -> _Problem:
    chain = list(_causes(error))
    names = {kind.__name__ for cause in chain for kind in type(cause).__mro__}
    statuses = [getattr(getattr(cause, "response", None), "status_code", None) for cause in chain]
    status = next((status for status in statuses if status is not None), None)
    if _is_offline() or "OfflineModeIsEnabled" in names:
        return _Problem("not in the cache, and HF_HUB_OFFLINE allows no download. Unset HF_HUB_OFFLINE")
    if status in (401, 403, 404) or "DatasetNotFoundError" in names:
        return _Problem(f"not in the cache, and not at {endpoint} or not public. Check the name and HF_TOKEN")
    if names & {"ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol", "InvalidURL"}:
        return _Problem(f"not in the cache, and {endpoint} cannot be reached. Check the network and HF_ENDPOINT")
    for cause in chain:
        if getattr(cause, "errno", None) in _DISK_ERRORS:
            return _Problem(f"not to be saved in the cache ({_one_line(cause)}). Check the disk and HF_HOME")
    if isinstance(error, ValueError | KeyError | TypeError):
        return _Problem(f"not usable as it is at {endpoint} ({_one_line(error)}). Check HF_ENDPOINT")
    reason = _one_line(error) if status is None else f"status {status}"
    text = f"not in the cache, and {endpoint} does not serve it ({reason}). Try later, check HF_ENDPOINT"
    return _Problem(text, reason, may_pass=status is None or status in (408, 429) or status >= 500)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _one_line(error: BaseException, limit: int = 160) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}" if text else type(error).__name__


def _is_offline() -> bool:
    import datasets
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the clients' warnings about tries and caches, and bars where nobody watches, out of the output."""
    import datasets
    import huggingface_hub

    levels = datasets.logging.get_verbosity(), huggingface_hub.logging.get_verbosity()
    datasets.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()
    # GLUE is small; a model's download deserves its bar, on a terminal.
    with_bars: list[Any] = [datasets] if sys.stderr.isatty() else [datasets, huggingface_hub.utils]
    with_bars = [module for module in with_bars if not module.are_progress_bars_disabled()]
    for module in with_bars:
        module.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(levels[0])
        huggingface_hub.logging.set_verbosity(levels[1])
        for module in with_bars:
            module.enable_progress_bars()


@contextmanager
def _quiet_offline() -> Iterator[None]:
    """Makes the clients look into their caches only. They read these two flags at each call."""
    import datasets
    from huggingface_hub import constants

    flags = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        with _quiet():
            yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = flags
