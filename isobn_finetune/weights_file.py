"""A digest inside each weights file, so that one altered on the way is told from the one that was saved.

The safetensors format notices a file cut short, but not changed bytes. The digest stands in the file's own metadata:
it travels with the file, and whatever saves the model again leaves it out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from isobn_finetune.errors import ConfigError
from isobn_finetune.whole_files import open_whole

_KEY = "isobn_finetune_sha256"
_BLOCK = 1 << 22


def seal_weights(model_dir: Path) -> None:
    """Writes the digest of its own content into each ``model*.safetensors`` of a folder."""
    for path in sorted(model_dir.glob("model*.safetensors")):
        with path.open("rb") as source:
            header = _read_header(source)
            header["__metadata__"] = {**header.get("__metadata__", {}), _KEY: _compute_digest(header, source)}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
            _seek_data(source)
            with open_whole(path, "wb") as target:
                target.write(len(text).to_bytes(8, "little") + text)
                shutil.copyfileobj(source, target, _BLOCK)


def check_weights(model_dir: Path) -> None:
    """Compares each weights file with its digest, where it has one.

    Raises:
        ConfigError: A file is not what was saved.
    """
    for path in sorted(model_dir.glob("model*.safetensors")):
        try:
            with path.open("rb") as source:
                header = _read_header(source)
                sealed = header.get("__metadata__", {}).get(_KEY)
                if sealed is None or sealed == _compute_digest(header, source):
                    continue
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: cannot be read ({type(error).__name__}); get the file again") from None
        raise ConfigError(f"{path}: not the file that was saved: its content does not match its digest; get it again")


def compute_weights_digest(model_dir: Path) -> str:
    """SHA-256 of all weights of a folder, whatever their format; equal for equal weights files."""
    digest = hashlib.sha256()
    for path in sorted((*model_dir.glob("model*.safetensors"), *model_dir.glob("pytorch_model*.bin"))):
        with path.open("rb") as source:
            while block := source.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _read_header(source: BinaryIO) -> dict[str, Any]:
    source.seek(0)
    size = int.from_bytes(source.read(8), "little")
    if size > 100_000_000:
        raise ValueError("no safetensors header")
    header = json.loads(source.read(size))
    if not isinstance(header, dict):
        raise ValueError("no safetensors header")
    return header


def _seek_data(source: BinaryIO) -> None:
    source.seek(0)
    source.seek(8 + int.from_bytes(source.read(8), "little"))


def _compute_digest(header: dict[str, Any], source: BinaryIO) -> str:
    """SHA-256 over names, types, shapes and places of the tensors, and over their bytes."""
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    digest = hashlib.sha256(json.dumps(tensors, sort_keys=True).encode())
    _seek_data(source)
    while block := source.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
