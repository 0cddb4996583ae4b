"""New texts to predict on, row by row: CSV, TSV, JSONL and parquet files, and plain lines.

Rows are read as they are needed, so a file may be larger than memory. No row is dropped or merged: an empty line of a
one-column file is an empty text, and what cannot be a row is an error that names its line.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from isobn_finetune.errors import ConfigError, DataError
from isobn_finetune.readers import decode_utf8
from isobn_finetune.tasks import TaskSpec

FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".parquet": "parquet", ".txt": "lines"}
"""Suffix to format."""

STDIN = "-"

_SINGLE: tuple[tuple[str, ...], ...] = (("text",),)
_PAIR: tuple[tuple[str, ...], ...] = (("text", "text_pair"),)
_ANY: tuple[tuple[str, ...], ...] = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question1", "question2"),
    *_PAIR,
    ("sentence",),
    *_SINGLE,
)
"""Columns to look for where no task says which."""

csv.field_size_limit(sys.maxsize)  # texts may be longer than its default of 128 KiB


class TextRow(NamedTuple):
    """One row: one or two texts, and the label as the file has it, ``None`` without one."""

    texts: tuple[str, ...]
    label: Any


@dataclass(frozen=True)
class TextInput:
    """Rows to come, and the names of their text columns."""

    columns: tuple[str, ...]
    rows: Iterator[TextRow]


@dataclass(frozen=True)
class _Wanted:
    """Columns to look for: sets of text columns, the best first, and names of the label."""

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    task: str

    def choose(self, there: Sequence[str], where: str) -> tuple[tuple[str, ...], str | None]:
        """Returns the text columns of a file and its label column."""
        label = next((name for name in self.labels if there.count(name) == 1), None)
        for columns in self.texts:
            if all(there.count(name) == 1 for name in columns):
                return columns, label if label not in columns else None
        nearest = max(self.texts, key=lambda columns: sum(name in there for name in columns))
        missing = next(name for name in nearest if there.count(name) != 1)
        problem = "is there twice" if missing in there else "is missing"
        raise ConfigError(
            f"{where}: column '{missing}' {problem}. Columns there: {', '.join(there) or 'none'}. "
            f"{self.task} reads {' and '.join(nearest)}."
        )


@contextmanager
def open_texts(source: str, spec: TaskSpec, file_format: str | None = None) -> Iterator[TextInput]:
    """Opens a file of texts, or standard input.

    Args:
        source: A path, or ``-`` for standard input.
        spec: The task; without text columns, the usual names are tried.
        file_format: One of ``FORMATS``' values. ``None``: by the suffix, and lines for standard input.

    Raises:
        ConfigError: The file cannot be read, or lacks a column.
        DataError: While rows are read: a bad one, named by its line or row.
    """
    if source != STDIN and Path(source).expanduser().is_dir():
        raise ConfigError(f"--input {source}: a folder, not a file. For the splits of a task use --data and --split.")
    kind = file_format or ("lines" if source == STDIN else FORMATS.get(Path(source).suffix.lower()))
    if kind is None or kind not in FORMATS.values():
        raise ConfigError(
            f"--input {source}: unknown kind of file. Name it {', '.join(FORMATS)}, or say --input-format."
        )
    where = "standard input" if source == STDIN else source
    with _open_bytes(source) as stream:
        yield _READERS[kind](stream, _find_wanted(spec), where)


@contextmanager
def _open_bytes(source: str) -> Iterator[BinaryIO]:
    if source == STDIN:
        yield sys.stdin.buffer
        return
    try:
        stream = Path(source).expanduser().open("rb")
    except OSError as error:
        raise ConfigError(f"--input {source}: cannot be read ({error.strerror}).") from error
    with stream:
        yield stream


def _find_wanted(spec: TaskSpec) -> _Wanted:
    if not spec.text_columns:
        return _Wanted(_ANY, ("label",), "This model")
    # GLUE's own files call some columns otherwise than the hub.
    original = [tuple(map(str, file.text)) for file in spec.files.values() if isinstance(file.text[0], str)]
    general = _SINGLE if len(spec.text_columns) == 1 else _PAIR
    labels = ["label", *(file.label for file in spec.files.values() if isinstance(file.label, str))]
    return _Wanted(
        tuple(dict.fromkeys((spec.text_columns, *original, *general))), tuple(dict.fromkeys(labels)), spec.title
    )


def _decode(stream: BinaryIO, where: str) -> Iterator[tuple[int, str]]:
    r"""Lines by 1-based number, with the ``\n`` that ends them, and without a byte-order mark."""
    for number, data in enumerate(stream, 1):
        text, bad = decode_utf8(data)
        if bad >= 0:
            raise DataError(
                f"{where}: line {number}: byte 0x{data[bad]:02x} is not UTF-8 text. Save the file as UTF-8."
            )
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def _decode_lines(stream: BinaryIO, where: str) -> Iterator[tuple[int, str]]:
    r"""Lines cut at ``\n`` with an optional ``\r`` before it, and at nothing else."""
    for number, text in _decode(stream, where):
        yield number, text.removesuffix("\n").removesuffix("\r")


def _read_lines(stream: BinaryIO, wanted: _Wanted, where: str) -> TextInput:
    """One text a line; for a task with two texts, the second after a tab."""
    columns = wanted.texts[0] if wanted.texts is not _ANY else ("text",)

    def rows() -> Iterator[TextRow]:
        for number, line in _decode_lines(stream, where):
            # Where there is one text, a tab is a character of it.
            texts = line.split("\t") if len(columns) > 1 else [line]
            if len(texts) != len(columns):
                raise DataError(
                    f"{where}: line {number}: {len(texts)} text{'' if len(texts) == 1 else 's'} where {wanted.task} "
                    f"needs {len(columns)}, with a tab between."
                )
            yield TextRow(tuple(texts), None)

    return TextInput(columns, rows())


def _read_tsv(stream: BinaryIO, wanted: _Wanted, where: str) -> TextInput:
    """Fields between tabs, no quoting: a quote mark is a character like any other."""
    return _read_table(((number, line.split("\t")) for number, line in _decode_lines(stream, where)), wanted, where)


def _read_csv(stream: BinaryIO, wanted: _Wanted, where: str) -> TextInput:
    """As RFC 4180: commas, double quotes around a field that holds commas, quotes or line ends."""

    def records() -> Iterator[tuple[int, list[str]]]:
        # Line ends are kept for the csv module: inside quotes they belong to the text.
        reader = csv.reader((text for _, text in _decode(stream, where)), strict=True)
        begin = 1
        while True:
            try:
                record = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(
                    f"{where}: line {begin}: not a whole CSV record ({error}). Mend its quote marks, or save as TSV."
                ) from None
            yield begin, record or [""]  # the module gives an empty list for an empty line
            begin = reader.line_num + 1

    return _read_table(records(), wanted, where)


def _read_table(records: Iterator[tuple[int, list[str]]], wanted: _Wanted, where: str) -> TextInput:
    """Records under a header, all as wide as it."""
    first = next(records, None)
    if first is None:
        raise ConfigError(f"{where}: empty, not even a header. {wanted.task} reads {' and '.join(wanted.texts[0])}.")
    header = first[1]
    columns, label = wanted.choose(header, where)
    places = [header.index(name) for name in columns]
    label_place = None if label is None else header.index(label)

    def rows() -> Iterator[TextRow]:
        blank: int | None = None
        for number, record in records:
            if len(header) > 1 and record == [""]:
                blank = blank or number  # at the end of a file no row, but what an editor left
                continue
            if blank is not None:
                raise DataError(
                    f"{where}: line {blank}: blank where {len(header)} fields are expected. Remove that line."
                )
            if len(record) != len(header):
                raise DataError(
                    f"{where}: line {number}: {len(record)} field{'' if len(record) == 1 else 's'} where "
                    f"{len(header)} are expected. Mend or remove that line."
                )
            yield TextRow(
                tuple(record[place] for place in places), None if label_place is None else record[label_place]
            )

    return TextInput(columns, rows())


def _read_jsonl(stream: BinaryIO, wanted: _Wanted, where: str) -> TextInput:
    """One object a line; the first says which columns there are."""

    def objects() -> Iterator[tuple[int, dict[str, Any]]]:
        blank: int | None = None
        for number, line in _decode_lines(stream, where):
            if not line.strip():
                blank = blank or number
                continue
            if blank is not None:
                raise DataError(f"{where}: line {blank}: blank where a JSON object is expected. Remove that line.")
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise DataError(f"{where}: line {number}: not a JSON object. Mend or remove that line.")
            yield number, value

    remaining = objects()
    first = next(remaining, None)
    if first is None:
        return TextInput(wanted.texts[0], iter(()))
    columns, label = wanted.choose(list(first[1]), where)

    def rows() -> Iterator[TextRow]:
        for number, value in chain([first], remaining):
            texts = tuple(_check_text(value.get(name), name, f"{where}: line {number}") for name in columns)
            yield TextRow(texts, value.get(label) if label is not None else None)

    return TextInput(columns, rows())


def _read_parquet(stream: BinaryIO, wanted: _Wanted, where: str) -> TextInput:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if stream is sys.stdin.buffer:
        raise ConfigError("--input -: parquet needs a file, for it is read from its end. Give its path.")
    try:
        file = pq.ParquetFile(stream)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"{where}: cannot be read as parquet ({reason}).") from error
    columns, label = wanted.choose(file.schema_arrow.names, where)
    names = [*columns, *([] if label is None else [label])]

    def rows() -> Iterator[TextRow]:
        number = 0
        try:
            for batch in file.iter_batches(batch_size=4096, columns=names):
                values = [batch.column(name).to_pylist() for name in names]
                for row in zip(*values, strict=True):
                    texts = zip(row, columns, strict=False)
                    checked = tuple(_check_text(text, name, f"{where}: row {number}") for text, name in texts)
                    yield TextRow(checked, None if label is None else row[-1])
                    number += 1
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())[:120]
            raise DataError(f"{where}: damaged after row {number} ({reason}).") from error

    return TextInput(columns, rows())


def _check_text(value: Any, column: str, where: str) -> str:
    """What tokenizers take: a text, and one that UTF-8 can hold (JSON may spell halves of characters)."""
    if not isinstance(value, str):
        given = "no text" if value is None else f"{type(value).__name__} instead of a text"
        raise DataError(f"{where}: {given} in '{column}'. Mend or remove that row.")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{where}: half a character (a lone surrogate) in '{column}'. Mend that row.") from None
    return value


_READERS = {
    "csv": _read_csv,
    "tsv": _read_tsv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "lines": _read_lines,
}
