"""Tiny seeded models, a tokenizer from a checked-in vocabulary, and invented rows of every task. No network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# One thread: the models here are far too small for more, and a suite that shares its cores would crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

DATA = Path(__file__).parent / "data"

_SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_POSITIONS_AFTER_PADDING = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 66}

FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _SHAPE,
    "roberta": _SHAPE | _POSITIONS_AFTER_PADDING | {"type_vocab_size": 1},
    "xlm-roberta": _SHAPE | _POSITIONS_AFTER_PADDING | {"type_vocab_size": 1},
    "electra": _SHAPE | {"embedding_size": 8},
    "albert": _SHAPE | {"embedding_size": 8},
    "distilbert": {
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 24,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "deberta-v2": _SHAPE
    | {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "mpnet": _SHAPE | _POSITIONS_AFTER_PADDING,
    "modernbert": {key: value for key, value in _SHAPE.items() if "dropout" not in key}
    | {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
}
ROBERTA_LIKE = ("roberta", "xlm-roberta", "mpnet")


def create_tokenizer(family: str) -> Any:
    """A fast tokenizer with the checked-in words and the special tokens of the family."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertTokenizerFast, PreTrainedTokenizerFast

    words = (DATA / "vocab.txt").read_text(encoding="utf-8").split("\n")[:-1]
    if family not in ROBERTA_LIKE:
        names = ["input_ids", "attention_mask"] if family in ("distilbert", "modernbert") else None
        vocab = {word: index for index, word in enumerate(words)}
        return BertTokenizerFast(vocab=vocab, do_lower_case=True, **({"model_input_names": names} if names else {}))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocab = {word: index for index, word in enumerate(special + words[5:])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_input_names=["input_ids", "attention_mask"],
    )


def create_encoder_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    size = len((DATA / "vocab.txt").read_text(encoding="utf-8").split("\n")) - 1
    return AutoConfig.for_model(family, **{"vocab_size": size, **FAMILY_CONFIGS[family], **changes})


def save_model(folder: Path, family: str, auto_class: str = "AutoModel", seed: int = 0, **changes: Any) -> Path:
    """Saves a random model with its tokenizer; ``auto_class`` says with which head."""
    import torch
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, auto_class).from_config(create_encoder_config(family, **changes))
        with torch.no_grad():  # as drawn, tiny models give every text the same vector
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4.0 if "embedding" in name else 6.0)
    model.save_pretrained(folder)
    create_tokenizer(family).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_handlers_left() -> Iterator[None]:
    """The command line adds a handler to our logger; a test must not leave it to the next."""
    import logging

    logger = logging.getLogger("isobn_finetune")
    before, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_model(family, auto_class, **config)``: a folder with a random model and its tokenizer, made once."""
    made: dict[str, Path] = {}

    def make(family: str, auto_class: str = "AutoModel", **changes: Any) -> Path:
        key = json.dumps([family, auto_class, changes], sort_keys=True)
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(f"{family}-model") / family, family, auto_class, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def bert_dir(make_model: Callable[..., Path]) -> Path:
    """A seeded BERT of two layers, 16 wide."""
    return make_model("bert")


@pytest.fixture(scope="session")
def roberta_dir(make_model: Callable[..., Path]) -> Path:
    """A seeded RoBERTa of two layers, 16 wide, saved with its masked-LM head, so without a pooler."""
    return make_model("roberta", "AutoModelForMaskedLM")


@pytest.fixture(scope="session")
def glue_dir() -> Path:
    """Eight invented rows of every task in the original GLUE layout."""
    return DATA / "glue"


@dataclass
class Outcome:
    """What a command came to."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The last line on stderr, which says what went wrong."""
        lines = self.stderr.strip().splitlines()
        return lines[-1] if lines else ""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``cli("run", "--task", "rte", ...)`` in this process."""
    from isobn_finetune.cli import main

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(leaving.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def run(cli: Callable[..., Any], bert_dir: Path, glue_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """``run("rte", "--norm", "none", into="out")``: two epochs of two steps on the small BERT, in fp32."""

    def call(task: str, *options: object, into: str = "out", model: Any = bert_dir, data: Any = glue_dir) -> Any:
        base = ["--task", task, "--model", model, "--data", data, "--output-dir", tmp_path / into]
        base += ["--precision", "fp32", "--epochs", 2, "--batch-size", 4, "--learning-rate", 1e-3]
        return cli("run", *base, *options)

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, bert_dir: Path, glue_dir: Path) -> Path:
    """A finished run of RTE with IsoBN. Tests only read it."""
    from isobn_finetune import RunConfig, fine_tune

    folder = tmp_path_factory.mktemp("finished") / "run"
    values = {
        "task": "rte",
        "model": {"name": str(bert_dir)},
        "data": {"source": str(glue_dir)},
        "norm": {"name": "isobn"},
        "precision": "fp32",
        "output_dir": str(folder),
        "train": {"epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1},
    }
    fine_tune(RunConfig.model_validate(values))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))
