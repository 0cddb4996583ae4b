"""Writes a classifier as ONNX, for any batch size and length, and checks it with onnxruntime."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobn_finetune.encoding import PaddingCollator
from isobn_finetune.errors import ConfigError, IsobnError
from isobn_finetune.export import check_export_folder, create_stock_config, find_rows, fold_norm, save_tokenizer
from isobn_finetune.model_card import write_export_card
from isobn_finetune.modeling import IsobnConfig
from isobn_finetune.run_folder import replace_folder
from isobn_finetune.saved_model import SavedModel, forget_local_paths, open_model
from isobn_finetune.text_files import TextRow
from isobn_finetune.whole_files import clean_interrupt

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference between logits of onnxruntime and ours."""
MODEL_FILE = "model.onnx"

_BATCH_SIZES = (1, 2, 5, 16)
_LARGEST_FILE = 1 << 30
"""Bytes of weights that go into the file itself; protobuf ends at 2 GiB, and larger models keep them beside it."""


class LogitsOnly(nn.Module):
    """A model that takes its inputs by place and gives nothing but logits ``(batch, num_labels)``."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the logits."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


def export_onnx(model: str, output_dir: Path) -> str:
    """Writes ``model.onnx`` with inputs ``(batch, length)`` of any size, tokenizer, config and card.

    Args:
        model: Run folder, model folder, or hub id; one of ours in any pooling, or a stock classifier.
        output_dir: New or empty.

    Returns:
        One line that says what was written and how far apart the logits were.

    Raises:
        ConfigError: Nothing was started: packages are missing, or model or folder cannot be used.
        IsobnError: onnxruntime gives other logits; nothing was written.
    """
    _require_packages()
    check_export_folder(output_dir)
    saved = open_model(model)
    rows, origin = find_rows(saved)
    ours = isinstance(saved.model.config, IsobnConfig)
    folded: Any = fold_norm(saved.model) if ours else copy.deepcopy(saved.model)
    folded.cpu()
    # Fused attention kernels have no ONNX twin; this is the same function.
    (folded.encoder if ours else folded).set_attn_implementation("eager")
    differences: list[float] = []

    def fill(folder: Path) -> None:
        names = _write_graph(folded, saved, rows, folder / MODEL_FILE)
        config = create_stock_config(saved.model.config) if ours else copy.deepcopy(saved.model.config)
        forget_local_paths(config)
        config.save_pretrained(folder)
        save_tokenizer(folder, saved.tokenizer, names)
        difference = compare_with_onnx(saved, folder / MODEL_FILE, rows)
        if not difference <= TOLERANCE:
            raise IsobnError(
                f"{output_dir}: not written: logits of onnxruntime differ from ours by up to {difference:.1e} on "
                f"{len(rows)} rows of {origin}, more than {TOLERANCE:.0e}"
            )
        differences.append(difference)
        write_export_card(folder, saved, "an ONNX graph", difference, f"{len(rows)} rows of {origin}")

    with clean_interrupt():
        replace_folder(output_dir, fill)
    return (
        f"{MODEL_FILE}, any batch size and length; on {len(rows)} rows of {origin}, in batches of "
        f"{', '.join(map(str, _BATCH_SIZES))}, its logits are at most {differences[0]:.1e} from ours"
    )


def _require_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--format onnx needs the package {error.name}: pip install 'isobn-finetune[onnx]'") from None


def _write_graph(model: nn.Module, saved: SavedModel, rows: list[TextRow], path: Path) -> list[str]:
    """Writes the graph and returns the names of its inputs."""
    import onnx

    batch = PaddingCollator(saved.tokenizer)(saved.encode([row.texts for row in rows[:3]]))
    names = list(batch)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            LogitsOnly(model, names).eval(),
            tuple(batch.values()),
            dynamo=True,
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=(tuple(sizes for _ in names),),
            verbose=False,
        )
    assert program is not None  # dynamo=True always gives one
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with _quiet():
        program.save(str(path), external_data=weights > _LARGEST_FILE)
    proto = onnx.load(str(path), load_external_data=False)
    _forget_sources(proto)
    path.write_bytes(proto.SerializeToString())
    return names


def _forget_sources(proto: Any) -> None:
    """Takes out the exporter's notes on each node, which quote source files and where they lie on this machine."""
    graphs = [proto.graph, *proto.functions]
    while graphs:
        graph = graphs.pop()
        graph.ClearField("metadata_props")
        graph.ClearField("doc_string")
        for node in graph.node:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for value in (*graph.value_info, *getattr(graph, "input", ()), *getattr(graph, "output", ())):
            if hasattr(value, "ClearField"):  # a function's inputs are names
                value.ClearField("metadata_props")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's progress notes off the terminal."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@torch.inference_mode()
def compare_with_onnx(saved: SavedModel, path: Path, rows: list[TextRow]) -> float:
    """Largest difference of logits between onnxruntime and our model, over batches of several sizes and lengths."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    collate = PaddingCollator(saved.tokenizer)
    worst, start, turn = 0.0, 0, 0
    while start < len(rows):
        size = _BATCH_SIZES[turn % len(_BATCH_SIZES)]
        batch = collate(saved.encode([row.texts for row in rows[start : start + size]]))
        start, turn = start + size, turn + 1
        theirs = session.run(["logits"], {name: batch[name].numpy() for name in names})[0]
        ours = saved.model(**{name: value.to(saved.model.device) for name, value in batch.items()}).logits
        worst = float(np.maximum(worst, np.abs(theirs - ours.float().cpu().numpy()).max()))  # keeps NaN
    return worst
