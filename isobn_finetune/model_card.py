"""The README.md of a saved model: what it is, how it scored, and how to load it; for people and for the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from isobn_finetune.config import RunConfig, slugify
from isobn_finetune.data import DEMO, HUB
from isobn_finetune.errors import IsobnError
from isobn_finetune.run_folder import RunFolder, write_text

if TYPE_CHECKING:
    from isobn_finetune.results import RunResult
    from isobn_finetune.saved_model import SavedModel

CARD = "README.md"

_METRIC_IDS = {"pearson": "pearsonr"}
"""The hub calls some metrics otherwise."""
_VERSIONS = ("isobn-finetune", "python", "torch", "transformers", "datasets", "accelerate")
_TITLES = {"pooler_output": "before the norm", "normed_output": "after the norm"}

_LOAD_OURS = """\
```python
from isobn_finetune import load_model

model, tokenizer = load_model("path/to/this/folder")
logits = model(**tokenizer({texts}, return_tensors="pt")).logits
```

Once `isobn_finetune` is imported, `AutoModelForSequenceClassification.from_pretrained` and
`transformers.pipeline("text-classification")` load it too. `isobn-finetune export` makes a stock checkpoint of it that
needs nothing but transformers."""

_LOAD_STOCK = """\
```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
logits = model(**tokenizer({texts}, return_tensors="pt")).logits
```"""

_LOAD_ONNX = """\
```python
import onnxruntime
from transformers import AutoTokenizer

session = onnxruntime.InferenceSession("path/to/this/folder/model.onnx")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
names = [node.name for node in session.get_inputs()]
encoded = tokenizer({texts}, return_tensors="np")
logits = session.run(["logits"], {{name: encoded[name] for name in names}})[0]
```"""


def write_model_card(folder: Path, config: RunConfig, result: RunResult) -> None:
    """Writes the card of a model that a run saved."""
    body = [
        *_describe(config, result),
        "",
        "## Use",
        "",
        _LOAD_OURS.format(texts=_example(len(config.spec.text_columns))),
    ]
    _write(folder, _create_header(config, result), body)


def write_export_card(folder: Path, saved: SavedModel, kind: str, difference: float, rows: str) -> None:
    """Writes the card of an exported model, with its run's scores where the run's folder is there.

    Args:
        folder: Of the exported model.
        saved: What was exported.
        kind: What it is now, such as ``a stock `BertForSequenceClassification```.
        difference: Largest difference between its logits and the original's.
        rows: On which rows that was measured.
    """
    load = _LOAD_ONNX if (folder / "model.onnx").exists() else _LOAD_STOCK
    norm = getattr(saved.model.config, "norm", None)
    fold = "It had no norm to fold in."
    if norm is not None:
        fold = (
            f"Its norm, {escape(norm['name'])}{_list_options(norm)}, was folded into the classifier: where the norm is "
            "x * weight + shift, the classifier's weights are now W diag(weight), and its bias b + W shift."
        )
    measured = f"Measured on {escape(rows)}, its logits are at most {difference:.1e} from those of the original."
    exported = ["", "## Export", "", f"This is {kind}. {fold} {measured}", "", "## Use", ""]
    exported.append(load.format(texts=_example(len(saved.spec.text_columns))))
    result = _read_result(saved)
    if saved.config is not None and result is not None:
        header, body = _create_header(saved.config, result), _describe(saved.config, result)
    else:
        header, body = _create_plain_header(), [f"# {escape(saved.spec.title)}"]
    _write(folder, header, [*body, *exported])


def escape(text: object) -> str:
    """Text of a config or of data, as Markdown shows it as it is, on one line."""
    line = " ".join(str(text).split())
    return re.sub(r"([\\`*_{}\[\]<>()#|~!&])", r"\\\1", line)


def _read_result(saved: SavedModel) -> RunResult | None:
    from isobn_finetune.results import RunResult

    if saved.config is None:
        return None
    folder = RunFolder(saved.folder.parent)
    try:
        values = folder.read_result()
    except IsobnError:
        return None
    return None if values is None else RunResult.from_json(folder.path, values)


def _create_plain_header() -> dict[str, Any]:
    return {"library_name": "transformers", "pipeline_tag": "text-classification", "tags": ["isobn-finetune"]}


def _create_header(config: RunConfig, result: RunResult) -> dict[str, Any]:
    """Metadata that the hub reads: scores as ``model-index``, one entry a split."""
    spec = config.spec
    header = _create_plain_header()
    if _is_hub_id(config.model.name):
        header["base_model"] = config.model.name
    if config.data.source == HUB:
        header["datasets"] = ["nyu-mll/glue"]
    header["metrics"] = [_METRIC_IDS.get(name, name) for name in spec.metrics]
    entries = []
    for split, values in result.metrics.items():
        metrics = [
            {"type": _METRIC_IDS.get(name, name), "value": round(value, 6), "name": name}
            for name, value in values.items()
            if value is not None  # what is undefined is told in the text
        ]
        if metrics:
            task = {"type": "text-classification", "name": spec.title}
            entries.append({"task": task, "dataset": _name_dataset(config, split), "metrics": metrics})
    if entries:
        name = f"{slugify(config.model.name)}-{spec.name}-{config.norm.name}"
        header["model-index"] = [{"name": name, "results": entries}]
    return header


def _name_dataset(config: RunConfig, split: str) -> dict[str, str]:
    spec = config.spec
    if config.data.source == HUB:
        return {"name": f"GLUE {spec.title}", "type": "nyu-mll/glue", "config": spec.name, "split": split}
    if config.data.source == DEMO:
        return {"name": f"isobn-finetune demo corpus, {spec.title}", "type": "isobn-finetune-demo", "split": split}
    # Whatever the folder holds: its rows need not be GLUE's.
    return {"name": f"{spec.title}, from a local folder", "type": spec.name, "split": split}


def _is_hub_id(name: str) -> bool:
    return name != "tiny" and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not Path(name).exists()


def _describe(config: RunConfig, result: RunResult) -> list[str]:
    """What the model is, its scores and isotropy, and how it was trained."""
    spec, train = config.spec, config.train
    classes = ", ".join(escape(name) for name in spec.labels)
    head = f"Classes, in the order of the logits: {classes}." if classes else "One output: the score itself."
    norm = f"{config.norm.name}{_list_options(result.norm)}"
    columns = " and ".join(escape(name) for name in spec.text_columns)
    source = config.data.source if config.data.source in (HUB, DEMO) else "a local folder"
    lines = [
        f"# {escape(spec.title)}, norm {config.norm.name}",
        "",
        f"Fine-tuned from `{slugify(config.model.name)}` on {escape(spec.title)} (data: {source}) with isobn-finetune.",
        f"Input: {columns}, cut at {config.data.max_length} tokens. {head}",
        f"Norm between pooler and classifier: {norm}. Sentence vector: {config.model.pooling}.",
        "",
        "## Scores",
        "",
        *_table(
            ("split", "metric", "score"),
            (
                (split, name, _number(value))
                for split, values in result.metrics.items()
                for name, value in values.items()
            ),
        ),
        "",
        f"The best epoch was chosen by {config.best_metric} on {spec.selection_split}.",
    ]
    if result.collapsed:
        lines += ["", "**Collapsed**: on that split every prediction is the same."]
    if result.reason:
        lines += ["", f"Undefined: {escape(result.reason)}."]
    isotropy = result.isotropy or {}
    if isotropy:
        measures = ("ev1", "ev2", "ev3", "isoscore")
        lines += ["", "## Isotropy", "", f"Of the sentence vectors of {isotropy.get('n')} training rows.", ""]
        lines += _table(
            ("", "EV_1", "EV_2", "EV_3", "IsoScore"),
            (
                (_TITLES[place], *(_number(isotropy[place].get(key)) for key in measures))
                for place in _TITLES
                if place in isotropy
            ),
        )
    facts = {
        "seed": config.seed,
        "steps": result.train.get("steps"),
        "epochs": result.train.get("epochs"),
        "batch size": train.batch_size,
        "learning rate": train.learning_rate,
        "weight decay": train.weight_decay,
        "precision": result.train.get("precision"),
    }
    versions = {name: result.environment.get(name) for name in _VERSIONS}
    lines += ["", "## Training", "", *_table(("setting", "value"), facts.items())]
    lines += ["", *_table(("package", "version"), versions.items())]
    return lines


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return lines + [f"| {' | '.join(escape(value) for value in row)} |" for row in rows]


def _list_options(norm: Mapping[str, Any]) -> str:
    options = ", ".join(f"{escape(key)} {escape(value)}" for key, value in norm.items() if key != "name")
    return f" ({options})" if options else ""


def _example(texts: int) -> str:
    return '"some text", "another text"' if texts == 2 else '"some text"'


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _write(folder: Path, header: Mapping[str, Any], lines: list[str]) -> None:
    metadata = yaml.safe_dump(dict(header), sort_keys=False, allow_unicode=True, width=1000)
    write_text(folder / CARD, "\n".join(["---", metadata.strip(), "---", "", *lines]) + "\n")
