"""Splits of a task from the hub, the demo corpus or a folder, always with the same columns."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobn_finetune.errors import ConfigError
from isobn_finetune.readers import Columns, read_glue_tsv, read_parquet
from isobn_finetune.tasks import TaskSpec, normalize_task_name

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub"
DEMO = "demo"

_SHARD = re.compile(r"(?P<split>\w+)-(?P<index>\d{5})-of-(?P<total>\d{5})\.parquet")


def load_splits(spec: TaskSpec, source: str, splits: Sequence[str] | None = None) -> dict[str, Dataset]:
    """Loads splits of one task.

    Args:
        spec: The task.
        source: ``hub``, ``demo``, or a folder in the original GLUE layout or with parquet in the hub's layout.
        splits: Splits to load, all of them needed. ``None``: all that exist; then ``train`` and the selection
            split are needed.

    Returns:
        Split to rows with ``spec.text_columns`` (str), ``label`` (index in ``spec.labels``, -1 where hidden; for
        regression a float, -1.0 where hidden) and ``idx`` (0-based row within the split).

    Raises:
        ConfigError: A source, split, file or column is missing; found before any row is read where it can be.
        DataError: A bad row, named by file and row.
    """
    for split in splits or ():
        if split not in spec.splits:
            raise ConfigError(f"task {spec.name} has no split '{split}'. Known: {', '.join(spec.splits)}.")
    wanted = spec.splits if splits is None else tuple(dict.fromkeys(splits))
    needed = {"train", spec.selection_split} & set(spec.splits) if splits is None else set(wanted)
    if source == HUB:
        from isobn_finetune.hub import load_hub_splits

        return {split: create_split(spec, columns) for split, columns in load_hub_splits(spec, wanted, needed).items()}
    if source == DEMO:
        from isobn_finetune.demo import load_demo_rows

        rows = {split: load_demo_rows(spec.name, split) for split in wanted}
        return {split: create_split(spec, _transpose(spec, rows[split])) for split in rows}
    files = find_files(spec, source, wanted, needed)
    return {split: create_split(spec, _read_split(spec, split, paths)) for split, paths in files.items()}


def compute_fingerprint(splits: Mapping[str, Dataset]) -> str:
    """SHA-256 over names of splits, texts and labels: equal for equal rows whichever source they came from.

    Labels that are real numbers count as float32, the precision of the hub's copy. The order of the splits does
    not matter, that of the rows does.
    """
    import numpy as np

    digest = hashlib.sha256()
    for name in sorted(splits):
        split = splits[name]
        columns = [column for column, kind in split.features.items() if kind.dtype == "string"]
        digest.update(f"{name}\t{len(split)}\t{len(columns)}\n".encode())
        for column in columns:
            texts = [text.encode() for text in split[column][:]]
            lengths = np.fromiter(map(len, texts), "<i8", len(texts))
            digest.update(lengths.tobytes())  # so that no two texts run into one
            digest.update(b"".join(texts))
        kind = "<f4" if split.features["label"].dtype.startswith("float") else "<i8"
        digest.update(np.asarray(split["label"][:], dtype=kind).tobytes())
    return digest.hexdigest()


def create_split(spec: TaskSpec, columns: Columns) -> Dataset:
    """Rows as a ``Dataset`` with the columns that `load_splits` promises."""
    from datasets import Dataset, Features, Value

    rows = len(columns["label"])
    features = {name: Value("string") for name in spec.text_columns}
    features |= {"label": Value("float64" if spec.is_regression else "int64"), "idx": Value("int64")}
    return Dataset.from_dict(
        {**{name: columns[name] for name in (*spec.text_columns, "label")}, "idx": list(range(rows))},
        features=Features(features),
    )


def find_files(spec: TaskSpec, source: str, wanted: Sequence[str], needed: set[str]) -> dict[str, list[Path]]:
    """Finds the files of a task in a data folder: one TSV file for each split, or its parquet shards in order.

    Args:
        spec: The task.
        source: Folder that holds the task's folder (``RTE`` or ``rte``, in any case), or that folder itself.
        wanted: Splits to look for.
        needed: Those of them that must be there.

    Raises:
        ConfigError: The folder, a needed file or a shard is missing; says what was looked for.
    """
    root = Path(os.path.expanduser(source))
    if not source or not os.path.isdir(root):
        kind = "a file, not a folder" if source and os.path.exists(root) else "no such folder"
        raise ConfigError(f"--data '{source}': {kind}. Give 'hub', 'demo' or a folder with {spec.folder}/ in it.")
    folders = _task_folders(spec, root)
    if not folders:
        there = ", ".join(sorted(child.name for child in _subfolders(root))[:20]) or "none"
        raise ConfigError(
            f"--data {source}: no folder {spec.folder} or {spec.name} for task {spec.name}. Folders there: {there}."
        )
    # Where RTE/ and rte/ lie side by side, the first that holds a file of the task.
    found, folder = next(
        ((files, folder) for folder in folders if (files := _files_in(spec, folder, wanted))), ({}, folders[0])
    )
    for split in wanted:
        if split in needed and split not in found:
            raise ConfigError(
                f"{folder}: split {split} of task {spec.name} is missing: neither {spec.files[split].name} nor "
                f"{split}-00000-of-00001.parquet is there. Put the file there or choose another --data."
            )
    return {split: found[split] for split in wanted if split in found}


def _task_folders(spec: TaskSpec, root: Path) -> list[Path]:
    names = {normalize_task_name(spec.folder), spec.name}
    matches = [child for child in _subfolders(root) if normalize_task_name(child.name) in names]
    if not matches and normalize_task_name(root.resolve().name) in names:
        return [root]
    preferred = (spec.folder, spec.name)
    return sorted(matches, key=lambda child: (child.name not in preferred, child.name != spec.folder, child.name))


def _subfolders(root: Path) -> list[Path]:
    try:
        return [child for child in root.iterdir() if child.is_dir()]
    except OSError as error:
        raise ConfigError(f"{root}: cannot be read ({error.strerror or error}).") from error


def _files_in(spec: TaskSpec, folder: Path, wanted: Sequence[str]) -> dict[str, list[Path]]:
    """Files of the wanted splits that are there; where both formats lie in one folder, the original GLUE file."""
    shards: dict[str, list[tuple[int, int, Path]]] = {}
    for path in sorted(folder.glob("*.parquet")):
        if match := _SHARD.fullmatch(path.name):
            shards.setdefault(match["split"], []).append((int(match["total"]), int(match["index"]), path))
        elif path.stem in spec.splits:
            shards.setdefault(path.stem, []).append((1, 0, path))
    found: dict[str, list[Path]] = {}
    for split in wanted:
        original = folder / spec.files[split].name
        if original.exists():
            found[split] = [original]
        elif split in shards:
            found[split] = _complete_shards(split, shards[split])
    return found


def _complete_shards(split: str, shards: list[tuple[int, int, Path]]) -> list[Path]:
    folder, totals = shards[0][2].parent, sorted({total for total, _, _ in shards})
    if len(totals) > 1 or len(shards) > totals[0]:
        raise ConfigError(
            f"{folder}: parquet files of more than one copy of split {split}: "
            f"{', '.join(path.name for _, _, path in shards)}. Keep one set."
        )
    by_index = {index: path for _, index, path in shards}
    for index in range(totals[0]):
        if index not in by_index:
            raise ConfigError(f"{folder}: {split}-{index:05d}-of-{totals[0]:05d}.parquet is missing. Put it there.")
    return [by_index[index] for index in range(totals[0])]


def _transpose(spec: TaskSpec, rows: list[dict[str, Any]]) -> Columns:
    return {name: [row[name] for row in rows] for name in (*spec.text_columns, "label")}


def _read_split(spec: TaskSpec, split: str, paths: list[Path]) -> Columns:
    file = spec.files[split]
    if paths[0].suffix == ".parquet":
        return read_parquet(paths, spec, labelled=file.label is not None)
    return read_glue_tsv(paths[0], file, spec)
