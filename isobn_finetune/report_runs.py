"""Run folders as the report reads them: found, checked against their own predictions, and named."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from isobn_finetune.config import NORM_CONFIGS
from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.metrics import METRICS
from isobn_finetune.run_folder import HARMLESS
from isobn_finetune.significance import score_runs
from isobn_finetune.sweep_config import PLACES, format_value
from isobn_finetune.tasks import TASKS

SCHEMA = 1
STATUSES = ("finished", "failed", "diverged")
_PARTS = ("model", "checkpoints", "predictions")
_IGNORED = {*HARMLESS, "task", "seed", "model.name", "model.trust_remote_code", "data.source", "train.packing"}
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


@dataclass
class Evaluation:
    """One evaluation of a run on its selection split."""

    step: int
    score: float | None
    ev3: float | None


@dataclass
class Run:
    """One run folder.

    Attributes:
        folder: Where it lies.
        path: The same for people: relative to the folder that was given.
        setting: Config key to value, for all that is neither task, model, norm, seed nor source of the data.
        status: As in ``result.json``; ``unfinished`` where there is none yet.
        labels: ``(n,)`` of the selection split, class numbers or scores; empty where no predictions were kept.
        predictions: ``(n,)`` likewise.
    """

    folder: Path
    path: str
    task: str
    model: str
    norm: str
    seed: int
    setting: dict[str, Any]
    status: str
    metric: str = ""
    score: float | None = None
    last_score: float | None = None
    metrics: dict[str, dict[str, float | None]] = field(default_factory=dict)
    best_step: int | None = None
    collapsed: bool = False
    ev3: tuple[float | None, float | None] = (None, None)
    seconds: float | None = None
    reason: str | None = None
    fingerprint: str = ""
    labels: np.ndarray = field(default_factory=lambda: np.empty(0))
    predictions: np.ndarray = field(default_factory=lambda: np.empty(0))
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Name of the task as GLUE prints it."""
        return title_of(self.task)


@dataclass
class Place:
    """What a sweep says about the runs below it."""

    folder: Path
    searched: list[str]


def title_of(task: str) -> str:
    """Name of a task as GLUE prints it; another task's own name."""
    return TASKS[task].title if task in TASKS else task


def load_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Reads all run folders below some folders.

    Returns:
        The runs, and one message for each that cannot be used.

    Raises:
        ConfigError: There is no such folder, or no run in it.
    """
    runs, problems = [], []
    seen: set[Path] = set()
    roots = [Path(folder) for folder in folders]
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder; give folders with runs in them")
        for folder, place in find_runs(root):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            path = folder.relative_to(root).as_posix() if folder != root else root.resolve().name
            shown = path if len(roots) == 1 else f"{root.resolve().name}/{path}"
            try:
                runs.append(read_run(folder, shown, place))
            except DataError as error:
                problems.append(f"{shown}/{error}")
    if not seen:
        raise ConfigError(f"{', '.join(map(str, roots))}: no run folder (with config.yaml or result.json) in it")
    return runs, problems


def find_runs(root: Path) -> Iterator[tuple[Path, Place | None]]:
    """Run folders at and below a folder, in order of their names, each with its sweep if it has one."""
    places: dict[str, Place | None] = {}
    for name, subfolders, files in os.walk(root, followlinks=True):
        parent = places.get(os.path.dirname(name)) if name != str(root) else _sweep_above(root)
        places[name] = _read_place(Path(name)) or parent if "sweep.yaml" in files else parent
        if "result.json" in files or "config.yaml" in files:
            yield Path(name), places[name]
            subfolders[:] = []  # a run holds no runs
        subfolders[:] = sorted(folder for folder in subfolders if not folder.startswith(".") and folder not in _PARTS)


def _sweep_above(root: Path) -> Place | None:
    """The sweep of which only a part was given."""
    for folder in root.resolve().parents[:4]:
        if (folder / "sweep.yaml").is_file():
            return _read_place(folder)
    return None


def _read_place(folder: Path) -> Place | None:
    try:
        values = yaml.load((folder / "sweep.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
        axes = values.get("grid") or values.get("zip")
        return Place(folder.resolve(), [key for key in axes if key not in PLACES])
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        return None


def read_run(folder: Path, path: str, place: Place | None = None) -> Run:
    """Reads one run folder.

    Raises:
        DataError: A file is missing, cut short or edited; the message begins with the file's name.
    """
    config = _read_config(folder)
    result = _read_result(folder)
    if result is None:
        if config is None:
            raise DataError("config.yaml: not a whole config file")
        named, status = config, "unfinished"
    else:
        named, status = result, result["status"]
    norm = named["norm"] if isinstance(named["norm"], dict) else {"name": named["norm"]}
    model = named["model"]["name"] if isinstance(named["model"], dict) else named["model"]
    searched = place.searched if place else []
    run = Run(
        folder=folder,
        path=path,
        task=str(named["task"]),
        model=name_model(str(model), folder, place),
        norm=name_norm(norm, [key.removeprefix("norm.") for key in searched if key.startswith("norm.")]),
        seed=int(named["seed"]),
        setting=_read_setting(config or {}, norm, searched),
        status=status,
    )
    if result is not None:
        _fill(run, result)
    return run


def _read_config(folder: Path) -> dict[str, Any] | None:
    try:
        values = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=_LOADER)
        return values if isinstance(values, dict) and {"task", "model", "norm", "seed"} <= set(values) else None
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _read_result(folder: Path) -> dict[str, Any] | None:
    file = folder / "result.json"
    if not file.is_file():
        return None
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DataError("result.json: cut short, or no JSON") from None
    problem = _find_fault(result)
    if problem:
        raise DataError(f"result.json: {problem}")
    return result


def _find_fault(result: Any) -> str | None:
    """What is wrong with the values of a result file."""
    if not isinstance(result, dict):
        return "no object"
    kinds = {"task": str, "model": str, "norm": dict, "seed": int, "status": str, "primary_metric": str}
    for key, kind in kinds.items():
        if not isinstance(result.get(key), kind) or isinstance(result.get(key), bool):
            return f"'{key}' is missing or is no {'number' if kind is int else kind.__name__}"
    if result.get("schema") != SCHEMA:
        return f"schema {result.get('schema')}, expected {SCHEMA}"
    if result["status"] not in STATUSES:
        return f"unknown status '{result['status']}'"
    if result["norm"].get("name") not in NORM_CONFIGS:
        return f"unknown norm '{result['norm'].get('name')}'"
    for key in ("score", "last_score"):
        if not (result.get(key) is None or _is_number(result[key])):
            return f"'{key}' is no number"
    if result["status"] == "finished":
        if result["primary_metric"] not in METRICS:
            return f"unknown metric '{result['primary_metric']}'"
        if "score" not in result:
            return "'score' is missing"
        for key in ("metrics", "train", "data", "best", "isotropy"):
            if not isinstance(result.get(key) or {}, dict):
                return f"'{key}' is no object"
        if not all(isinstance(values, dict) for values in (result.get("metrics") or {}).values()):
            return "'metrics' holds no metrics"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fill(run: Run, result: Mapping[str, Any]) -> None:
    run.reason = result.get("reason")
    run.metric = result["primary_metric"]
    run.seconds = (result.get("train") or {}).get("seconds")
    if run.status != "finished":
        return
    run.score, run.last_score = result["score"], result.get("last_score")
    run.metrics = result.get("metrics") or {}
    run.best_step = (result.get("best") or {}).get("step")
    run.collapsed = bool(result.get("collapsed"))
    isotropy = result.get("isotropy") or {}
    before, after = ((isotropy.get(place) or {}).get("ev3") for place in ("pooler_output", "normed_output"))
    run.ev3 = (before, after)
    run.fingerprint = str((result.get("data") or {}).get("fingerprint", ""))
    split = next(iter(run.metrics), "validation")  # the selection split comes first
    if (run.folder / "predictions").is_dir():
        run.predictions, run.labels = read_predictions(run.folder, split)
        _check_score(run, split)
    run.evaluations = _read_evaluations(run.folder, split, run.metric)


def read_predictions(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels of a split, ``(n,)`` each: class numbers in the order of the classes, or scores."""
    name = f"predictions/{split}.jsonl"
    try:
        text = (folder / name).read_text(encoding="utf-8")
        rows = json.loads("[" + ",".join(text.splitlines()) + "]")
        codes = {label: code for code, label in enumerate(rows[0].get("probabilities") or {})}
        columns = [[row[key] for row in rows] for key in ("prediction", "label")]
        if codes:
            columns = [[codes[value] for value in column] for column in columns]
        values = np.array(columns, dtype=np.int64 if codes else np.float64)
        if [row["idx"] for row in rows] != list(range(len(rows))) or not np.isfinite(values).all():
            raise ValueError
    except FileNotFoundError:
        raise DataError(f"{name}: missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise DataError(f"{name}: cut short or edited") from None
    return values[0], values[1]


def _check_score(run: Run, split: str) -> None:
    """The score must follow from the predictions; else one of the two was edited."""
    score = float(score_runs(run.metric, run.predictions[None], run.labels)[0])
    given = run.metrics.get(split, {}).get(run.metric, run.score)
    same = (
        (run.score is None and math.isnan(score))
        if run.score is None or math.isnan(score)
        else abs(run.score - score) < 1e-6
    )
    if not same or given != run.score:
        raise DataError(
            f"result.json: edited, or of other predictions: its score is {run.score}, and {run.metric} of "
            f"predictions/{split}.jsonl is {score:.6f}"
        )


def _read_evaluations(folder: Path, split: str, metric: str) -> list[Evaluation]:
    """Evaluations in order; what cannot be read is left out, as only curves depend on it."""
    evaluations = []
    try:
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    for text in lines:
        if '"evaluation"' not in text:
            continue
        try:
            line = json.loads(text)
            if line.get("split", split) == split:
                ev3 = ((line.get("isotropy") or {}).get("normed_output") or {}).get("ev3")
                evaluations.append(Evaluation(int(line["step"]), line["metrics"].get(metric), ev3))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return evaluations


def name_model(model: str, folder: Path, place: Place | None) -> str:
    """A model's name without the folders of the machine it was trained on."""
    if place is not None and model.startswith(str(place.folder) + os.sep):
        # It started from another run of its sweep; the sweep's folders are called by the model they all began with.
        return folder.resolve().relative_to(place.folder).parts[0].replace("--", "/")
    if not (os.path.isabs(model) or model[:1] in (".", "~") or len(PurePath(model).parts) > 2):
        return model
    path = PurePath(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def name_norm(norm: Mapping[str, Any], searched: Iterable[str] = ()) -> str:
    """The norm with the options that are not its defaults: ``isobn (eps 1e-05)``."""
    name = str(norm["name"])
    fields = NORM_CONFIGS[name].model_fields if name in NORM_CONFIGS else {}
    options = [
        f"{key} {format_value(value)}" if not isinstance(value, bool) else key if value else f"no {key}"
        for key, value in norm.items()
        if key in fields and key not in searched and key != "name" and value != fields[key].default
    ]
    return f"{name} ({', '.join(options)})" if options else name


def _read_setting(config: Mapping[str, Any], norm: Mapping[str, Any], searched: Iterable[str]) -> dict[str, Any]:
    setting: dict[str, Any] = {}
    for section, value in config.items():
        if section != "norm":
            values = (
                {f"{section}.{key}": inner for key, inner in value.items()}
                if isinstance(value, dict)
                else {section: value}
            )
            setting |= {key: inner for key, inner in values.items() if key not in _IGNORED}
    setting |= {f"norm.{key}": norm[key] for key in norm if f"norm.{key}" in searched}
    return setting
