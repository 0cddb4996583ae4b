"""Random classifiers as a run saves them, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import create_encoder_config, create_tokenizer

from isobn_finetune.config import create_run_config
from isobn_finetune.model_card import write_model_card
from isobn_finetune.modeling import IsobnConfig, IsobnForSequenceClassification
from isobn_finetune.results import RunResult, describe_environment
from isobn_finetune.run_folder import RunFolder, write_json
from isobn_finetune.saved_model import save_model
from isobn_finetune.tasks import get_task


def create_classifier(
    family: str = "bert",
    norm: str = "isobn",
    pooling: str = "pooler",
    task: str | None = None,
    bias: list[float] | None = None,
    **changes: Any,
) -> IsobnForSequenceClassification:
    """A random model whose norm has seen batches, so that folding it changes something.

    With ``bias`` it says the same of every row: these are its logits.
    """
    if family == "mpnet":
        changes["relative_attention_num_buckets"] = 32  # transformers counts on it whatever the config says
    names = get_task(task).labels or ("score",) if task else ("no", "yes", "maybe")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = IsobnConfig(
            create_encoder_config(family, **changes),
            {"name": norm},
            pooling,
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
            problem_type="regression" if len(names) == 1 else "single_label_classification",
            finetuning_max_length=32,
            **({"finetuning_task": task} if task else {}),
        )
        model = IsobnForSequenceClassification(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2 and "norm" not in name:
                    parameter.mul_(6.0)
            model.classifier.bias.normal_()
            if norm == "batchnorm":
                model.norm.weight.uniform_(0.5, 2.0)
                model.norm.bias.normal_()
            if bias is not None:
                model.classifier.weight.zero_()
                model.classifier.bias.copy_(torch.tensor(bias))
        model.norm.train()
        for _ in range(4):
            model.norm(torch.randn(12, 16) * torch.linspace(0.05, 0.9, 16) + 0.3)
    return model.eval()


def save_classifier(folder: Path, model: IsobnForSequenceClassification) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, create_tokenizer(model.config.encoder_config.model_type))
    return folder


def make_run(folder: Path, task: str, source: str, status: str = "finished", **options: Any) -> Path:
    """A run folder with a random model, its card, config and result."""
    run = RunFolder(folder)
    norm = options.get("norm", "isobn")
    config = create_run_config({"task": task, "model": "org/some-bert", "norm": norm, "data": {"source": source}})
    run.start(config)
    split = config.spec.selection_split
    isotropy = {"ev1": 0.5, "ev2": 0.6, "ev3": 0.7, "isoscore": 0.1}
    result = RunResult(
        str(folder),
        status,
        task,
        "org/some-bert",
        config.norm.model_dump(),
        seed=1,
        primary_metric=config.best_metric,
        score=0.625,
        metrics={split: {name: 0.625 for name in config.spec.metrics}},
        isotropy={"n": 80, "split": "train", "pooler_output": isotropy, "normed_output": {**isotropy, "ev1": 0.25}},
        train={"steps": 3, "epochs": 1.0, "precision": "fp32"},
        environment=describe_environment(),
    )
    if status == "finished":
        save_classifier(run.model, create_classifier(task=task, **options))
        write_model_card(run.model, config, result)
    write_json(run.result, result.to_json())
    return folder


def read_json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
