"""Exact readers of the file formats that GLUE comes in: tab-separated text and parquet.

GLUE's files are not CSV: a quote mark is a character like any other, so fields are cut at tabs and rows at
line feeds, nothing else. Rows are checked here, so that whatever passes can be trained on.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.tasks import HIDDEN_LABEL, GlueFile, TaskSpec

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

Columns = dict[str, list[Any]]
"""Column name to values; all columns of one split have the same length."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# `float` would also take "1_000", "nan" and blanks around the number.

_TASKS_WITH_BROKEN_ROWS = frozenset({"qqp"})
"""QQP's released train.tsv holds a few rows cut short; the hub's copy leaves them out, and so do we."""


def read_text(path: Path) -> str:
    """Reads a whole UTF-8 file, without its byte-order mark.

    Raises:
        ConfigError: The file cannot be opened.
        DataError: It holds bytes that are no UTF-8, or NUL, which no text has (UTF-16 without a mark does).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error}).") from error
    text, bad = decode_utf8(data)
    if bad >= 0:
        line = data.count(b"\n", 0, bad) + 1
        raise DataError(f"{path}: line {line}: byte 0x{data[bad]:02x} is not UTF-8 text. Save the file as UTF-8.")
    return text.removeprefix("\ufeff")


def decode_utf8(data: bytes) -> tuple[str, int]:
    """Returns the text and -1, or where the first byte stands that is no UTF-8, or NUL, which no text has."""
    try:
        return data.decode("utf-8"), data.find(b"\0")
    except UnicodeDecodeError as error:
        return "", error.start


def split_lines(text: str) -> list[str]:
    r"""Cuts at ``\n`` with an optional ``\r`` before it, and at nothing else.

    ``str.splitlines`` would also cut at U+2028, U+0085, vertical tabs and the like, which occur inside texts.
    """
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_tsv(
    path: Path, *, width: int | None = None, drop_broken: bool = False
) -> tuple[list[str], list[list[str]], list[int]]:
    """Reads a tab-separated file without any quoting.

    Args:
        path: The file.
        width: Number of columns of a file without header; ``None`` where the first line is the header.
        drop_broken: Leave out rows with a wrong number of fields, and log how many.

    Returns:
        Header (empty without one), rows of fields, and the 1-based line of each row.

    Raises:
        ConfigError: The file cannot be opened or holds no row.
        DataError: A row has too few or too many fields, or the file is not UTF-8.
    """
    lines = split_lines(read_text(path))
    while len(lines) > 1 and lines[-1] == "":  # blank lines that an editor left at the end hold no row
        lines.pop()
    first = 1
    header: list[str] = []
    if width is None and lines:
        header = lines[0].split("\t")
        width, lines, first = len(header), lines[1:], 2
    if not lines or lines == [""]:
        raise ConfigError(f"{path}: holds no rows. Put the complete file there or choose another --data.")
    rows, numbers = [], []
    for number, line in enumerate(lines, first):
        row = line.split("\t")
        if len(row) == width:
            rows.append(row)
            numbers.append(number)
        elif not drop_broken:
            raise DataError(
                f"{path}: line {number}: {_count(len(row), 'tab-separated field')} where {width} are expected. "
                "Mend or remove that line."
            )
    if len(rows) < len(lines):
        logger.info("%s: left out %s with a wrong number of fields.", path, _count(len(lines) - len(rows), "row"))
    return header, rows, numbers


def read_glue_tsv(path: Path, file: GlueFile, spec: TaskSpec) -> Columns:
    """Reads one file of the original GLUE layout into the task's text columns and ``label``.

    Raises:
        ConfigError: A needed column is missing, or the file cannot be opened or is empty.
        DataError: A bad row, named by its 1-based line.
    """
    wanted = [*file.text, *([] if file.label is None else [file.label])]
    positions = [column for column in wanted if isinstance(column, int)]
    width = max(positions) + 1 if positions else None
    header, rows, lines = read_tsv(path, width=width, drop_broken=spec.name in _TASKS_WITH_BROKEN_ROWS)

    def column(key: str | int) -> list[str]:
        position = key if isinstance(key, int) else _find_column(key, header, path)
        return [row[position] for row in rows]

    columns: Columns = {name: column(key) for name, key in zip(spec.text_columns, file.text, strict=True)}
    if file.label is None:
        columns["label"] = [float(HIDDEN_LABEL) if spec.is_regression else HIDDEN_LABEL] * len(rows)
    else:
        columns["label"] = parse_labels(column(file.label), spec, True, lambda row: f"{path}: line {lines[row]}")
    return columns


def _find_column(name: str, header: Sequence[str], path: Path) -> int:
    if header.count(name) != 1:
        found = "is there twice" if name in header else "is missing"
        raise ConfigError(f"{path}: column '{name}' {found}. Columns there: {', '.join(header)}.")
    return header.index(name)


def parse_labels(
    values: Sequence[object], spec: TaskSpec, labelled: bool, where: Callable[[int], str]
) -> list[int] | list[float]:
    """Turns labels as written in a file into class indices in the order of ``spec.labels``, or numbers.

    Args:
        values: Class names, numbers, or ``None``.
        spec: The task.
        labelled: Whether every row must have a label; else ``None``, an empty label and -1 mean a hidden one.
        where: Row to the words that say where it stands.

    Raises:
        DataError: An unknown or missing label, or for regression something that is not a finite number.
    """
    parse = _parse_number if spec.is_regression else _class_parser(spec)
    hidden = float(HIDDEN_LABEL) if spec.is_regression else HIDDEN_LABEL
    known = "a finite number" if spec.is_regression else f"one of {', '.join(_class_words(spec))}"
    labels: list[Any] = []
    for row, value in enumerate(values):
        if not labelled and (value is None or value == "" or value == "-1" or value == HIDDEN_LABEL):
            labels.append(hidden)
            continue
        label = parse(value)
        if label is None:
            given = "no label" if value is None or value == "" else f"label {_shorten(value)}"
            raise DataError(f"{where(row)}: {given} where {known} is expected. Mend or remove that row.")
        labels.append(label)
    return labels


def _parse_number(value: object) -> float | None:
    if isinstance(value, str):
        number = float(value) if _NUMBER.fullmatch(value) else math.nan
    else:
        number = float(value) if isinstance(value, int | float) else math.nan
    return number if math.isfinite(number) else None


def _class_words(spec: TaskSpec) -> list[str]:
    if spec.label_words:
        return list(spec.labels)
    return [f"{index} ({name})" for index, name in enumerate(spec.labels)]


def _class_parser(spec: TaskSpec) -> Callable[[object], int | None]:
    """Names are matched whatever their case; digits only where GLUE's own files have digits."""
    known = {name.casefold(): index for index, name in enumerate(spec.labels)}
    if not spec.label_words:
        known |= {str(index): index for index in range(len(spec.labels))}

    def parse(value: object) -> int | None:
        if isinstance(value, str):
            return known.get(value.casefold())
        if isinstance(value, int | float) and value in range(len(spec.labels)):
            return int(value)
        return None

    return parse


def read_parquet(paths: Sequence[Path], spec: TaskSpec, labelled: bool) -> Columns:
    """Reads the shards of one split, in the order given, into the task's text columns and ``label``.

    Raises:
        ConfigError: A file is no parquet, lacks a column, or there are no rows.
        DataError: A row without text or with a bad label, named by its 0-based row in the file.
    """
    columns: Columns = {name: [] for name in (*spec.text_columns, "label")}
    for path in paths:
        for name, values in _read_parquet_file(path, spec, labelled).items():
            columns[name] += values
    if not columns["label"]:
        raise ConfigError(f"{paths[0]}: holds no rows. Put the complete file there or choose another --data.")
    return columns


def _read_parquet_file(path: Path, spec: TaskSpec, labelled: bool) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Opened by hand: given a path, pyarrow would take "key=value" folders above it for columns.
        with path.open("rb") as stream:
            table = pq.ParquetFile(stream).read()
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: cannot be read as parquet ({reason}). Put the complete file there.") from error
    return columns_from_table(table, _class_names(table.schema), spec, labelled, str(path))


def _class_names(schema: pa.Schema) -> list[str] | None:
    """Class names that `datasets` wrote into the schema's metadata, ``None`` where there are none."""
    try:
        info = json.loads((schema.metadata or {})[b"huggingface"])
        names = info["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def columns_from_table(
    table: pa.Table, class_names: Sequence[str] | None, spec: TaskSpec, labelled: bool, where: str
) -> Columns:
    """Checks an Arrow table in the hub's layout and turns its labels into indices of ``spec.labels``.

    Args:
        table: Text columns and ``label``; further columns are left out.
        class_names: What the label's integers stand for, in the table's own order; ``None`` where it does not
            say, then they count in the order of ``spec.labels``.
        spec: The task.
        labelled: Whether every row must have a label.
        where: File or data set, for messages.

    Raises:
        ConfigError: A column is missing or holds no text.
        DataError: A row without text or with a bad label.
    """
    import pyarrow as pa

    columns: Columns = {}
    needed = [*spec.text_columns, *(["label"] if labelled else [])]
    for name in needed:
        if name not in table.column_names:
            raise ConfigError(f"{where}: column '{name}' is missing. Columns there: {', '.join(table.column_names)}.")
    for name in spec.text_columns:
        column = _decode_dictionary(table.column(name))
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise ConfigError(f"{where}: column '{name}' holds {column.type}, not text.")
        columns[name] = column.to_pylist()
        if column.null_count:
            raise DataError(f"{where}: row {columns[name].index(None)}: no text in '{name}'. Mend or remove that row.")
    values: list[Any] = [None] * table.num_rows
    if "label" in table.column_names:
        column = _decode_dictionary(table.column("label"))
        values = column.to_pylist()
        if pa.types.is_float32(column.type):  # 3.8 was stored, so 3.8 it is, not 3.799999952316284
            import numpy as np

            values = [None if value is None else float(str(np.float32(value))) for value in values]
        if class_names is not None:
            values = [_class_name(value, class_names) for value in values]
    columns["label"] = parse_labels(values, spec, labelled, lambda row: f"{where}: row {row}")
    return columns


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _class_name(value: object, class_names: Sequence[str]) -> object:
    """Number to name; what is no number of a class stays, to be hidden or refused by its value."""
    if isinstance(value, int) and value != HIDDEN_LABEL:
        return class_names[value] if 0 <= value < len(class_names) else f"class {value}"
    return value


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _shorten(value: object, limit: int = 60) -> str:
    """A value in quotes, on one line; a text that slipped into the label's column is cut."""
    shown = repr(value if isinstance(value, str) else str(value))
    return shown if len(shown) <= limit else f"{shown[:limit]}...'"
