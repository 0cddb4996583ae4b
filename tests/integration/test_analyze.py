"""`analyze` from model and data folders to files, on a small random encoder and invented rows."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from isobn_finetune import analyze_report
from isobn_finetune.analyze import Encoder, analyze
from isobn_finetune.errors import ConfigError, IsobnError
from isobn_finetune.isotropy import explained_variance
from isobn_finetune.loading import create_model
from isobn_finetune.tasks import get_task

WORDS = (
    "the a cat dog bird man woman house river runs sleeps eats sees likes old young red big small and not in".split()
)
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded BERT, 2 layers, 16 wide, with a pooler whose bias is not zero."""
    folder = tmp_path_factory.mktemp("models") / "encoder"
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = BertModel(
        BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=64, initializer_range=0.5, **shape)
    )
    torch.nn.init.normal_(model.pooler.dense.bias)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLUE folders of RTE, CoLA and STS-B with 120 invented training rows of very different lengths."""
    folder = tmp_path_factory.mktemp("glue")
    rng = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(rng.choice(WORDS, size=rng.integers(1, 20)))

    lines = {
        "RTE": ["index\tsentence1\tsentence2\tlabel"]
        + [f"{i}\t{sentence()}\t{sentence()}\t{('entailment', 'not_entailment')[i % 2]}" for i in range(120)],
        "CoLA": [f"x\t{i % 2}\t\t{sentence()}" for i in range(120)],
        "STS-B": ["index\tsentence1\tsentence2\tscore"]
        + [f"{i}\t{sentence()}\t{sentence()}\t{i % 6 * 0.9:.1f}" for i in range(120)],
    }
    for name, rows in lines.items():
        (folder / name).mkdir()
        for split in ("train", "dev"):
            (folder / name / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def run_dir(encoder_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves: its classifier, with isobn fitted to a few batches, in the folder ``model``."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(1)
    model = create_model(encoder_dir, get_task("rte"), {"name": "isobn", "beta": 1.0, "eps": 1e-6})
    model.norm.train()
    for _ in range(50):
        model.norm(torch.randn(8, 16) * torch.linspace(0.01, 1, 16))
    model.save_pretrained(folder / "model")
    BertTokenizerFast.from_pretrained(encoder_dir).save_pretrained(folder / "model")
    (folder / "config.yaml").write_text("task: rte\n")
    return folder


def embed(model_dir: Path, data_dir: Path, task: str, max_rows: int) -> np.ndarray:
    """Pooler output by the stock model, one row at a time, so without padding."""
    model, tokenizer = BertModel.from_pretrained(model_dir).eval(), BertTokenizerFast.from_pretrained(model_dir)
    rows = (data_dir / get_task(task).folder / "train.tsv").read_text().splitlines()
    texts = [line.split("\t")[1:3] for line in rows[1:]] if task != "cola" else [line.split("\t")[3:] for line in rows]
    with torch.no_grad():
        outputs = [model(**tokenizer(*text, return_tensors="pt")).pooler_output[0] for text in texts[:max_rows]]
    return torch.stack(outputs).numpy()


@pytest.mark.parametrize("task", ["rte", "cola", "stsb"])
def test_analyze_measures_what_the_stock_encoder_gives_row_by_row(encoder_dir: Path, data_dir: Path, task: str) -> None:
    analysis = analyze(str(encoder_dir), [task], source=str(data_dir), max_rows=100, batch_size=32)
    entry = analysis.to_json()[task]["none"]
    expected = explained_variance(embed(encoder_dir, data_dir, task, 100))
    np.testing.assert_allclose([entry["ev1"], entry["ev2"], entry["ev3"]], expected, atol=1e-5)
    assert (entry["n"], entry["representation"]) == (100, "pooler")
    assert list(entry["representations"]) == ["pooler", "cls"]


def test_batch_size_changes_no_embedding(encoder_dir: Path, data_dir: Path) -> None:
    from isobn_finetune.data import load_splits

    spec = get_task("rte")
    rows = load_splits(spec, str(data_dir), ["train"])["train"]
    for representation in ("pooler", "cls", "mean"):
        encoder = Encoder(str(encoder_dir), spec, representation)
        one, many = (encoder.embed(rows, spec, 64, size)[representation] for size in (1, 50))
        np.testing.assert_allclose(one, many, atol=2e-5)


def test_analyze_writes_the_promised_files_for_several_tasks(encoder_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    analysis = analyze(str(encoder_dir), ["STS-B", "rte", "stsb"], source=str(data_dir), output_dir=out, top_k=5)
    result = json.loads((out / "analyze.json").read_text(), parse_constant=pytest.fail)
    assert list(result) == ["stsb", "rte", "average"]
    assert list(result["rte"]) == ["none", "batchnorm", "isobn"]
    assert {"n", "ev1", "ev5", "isoscore", "isoscore_star", "mean_cosine"} < set(result["rte"]["isobn"])
    assert result == json.loads(json.dumps(analysis.to_json()))
    rows = list(csv.DictReader(io.StringIO((out / "analyze.csv").read_text())))
    assert len(rows) == 3 * 3 * 2
    assert len(list((out / "plots").glob("*.png"))) == len(list((out / "plots").glob("*.svg"))) == 16
    assert "average" in analyze_report.format_analysis(analysis)
    assert not [path for path in out.rglob(".*")]


def test_analyze_repeats_bit_for_bit(encoder_dir: Path, data_dir: Path) -> None:
    first, second = (analyze(str(encoder_dir), ["rte"], source=str(data_dir)).to_json() for _ in range(2))
    assert first == second


def test_a_run_folder_shows_its_trained_norm_and_compares_with_its_encoder(
    run_dir: Path, encoder_dir: Path, data_dir: Path
) -> None:
    analysis = analyze(str(run_dir), ["rte"], source=str(data_dir), compare_to=str(encoder_dir))
    entries = analysis.to_json()["rte"]
    assert list(entries) == ["none", "batchnorm", "isobn", "trained"]
    assert (entries["trained"]["norm"]["name"], entries["trained"]["norm"]["beta"]) == ("isobn", 1.0)
    assert abs(entries["trained"]["ev1"] - entries["isobn"]["ev1"]) > 1e-3
    assert list(entries["trained"]["representations"]) == ["pooler"]
    compared = entries["none"]["representations"]["pooler"]["compared"]
    assert compared["ev3"] == pytest.approx(entries["none"]["ev3"], abs=1e-6)  # its encoder was never trained
    text = analyze_report.format_analysis(analysis)
    assert "trained isobn" in text
    assert "about as elongated as that of" in text


def test_a_pooler_that_no_checkpoint_holds_is_pointed_out(encoder_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    model = BertModel.from_pretrained(encoder_dir, add_pooling_layer=False)
    model.save_pretrained(tmp_path / "bare")
    BertTokenizerFast.from_pretrained(encoder_dir).save_pretrained(tmp_path / "bare")
    notes = analyze_report.list_notes(analyze(str(tmp_path / "bare"), ["rte"], source=str(data_dir)))
    assert [note.startswith("RTE, pooler") for note in notes if "no trained pooler" in note] == [True]

    zero_bias = BertModel.from_pretrained(encoder_dir)
    torch.nn.init.zeros_(zero_bias.pooler.dense.bias)
    zero_bias.save_pretrained(tmp_path / "zero")
    BertTokenizerFast.from_pretrained(encoder_dir).save_pretrained(tmp_path / "zero")
    notes = analyze_report.list_notes(analyze(str(tmp_path / "zero"), ["rte"], source=str(data_dir)))
    assert not any("no trained pooler" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["rtee"]}, "unknown task 'rtee'.*Did you mean 'rte'"),
        ({"tasks": []}, "at least one task"),
        ({"norms": ["iso_bn"]}, "unknown norm 'iso_bn'.*isobn"),
        ({"norms": ["isobn", "isobn"]}, "given twice"),
        ({"norms": [{"name": "batchnorm", "beta": 1}]}, "does not take"),
        ({"split": "tran"}, "no such split.*Did you mean 'train'"),
        ({"split": "validation_matched"}, "no such split"),
        ({"representation": "max"}, "Known: pooler, cls, mean"),
        ({"max_rows": 1}, "max-rows 1"),
        ({"top_k": 0}, "top-k 0"),
        ({"top_k": 17}, "top-k 17: .* has 16 dimensions"),
        ({"source": "nowhere"}, "no such folder"),
        ({"model": "no/such/model/here"}, "no/such/model/here"),
        ({"compare_to": "no/such/model/here"}, "^--compare-to .*no/such/model/here"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    encoder_dir: Path, data_dir: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    arguments = {"model": str(encoder_dir), "tasks": ["rte"], "source": str(data_dir), **options}
    with pytest.raises(ConfigError, match=message) as caught:
        analyze(**arguments, output_dir=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_split_file_and_a_file_as_output_folder_are_refused(
    encoder_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"split test of task rte is missing"):
        analyze(str(encoder_dir), ["rte"], source=str(data_dir), split="test")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        analyze(str(encoder_dir), ["rte"], source=str(data_dir), output_dir=tmp_path / "file")


def test_interrupting_while_embedding_leaves_nothing(
    encoder_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def interrupt(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("isobn_finetune.analyze._without_labels", lambda feature: interrupt(feature) or feature)
    with pytest.raises(KeyboardInterrupt):
        analyze(str(encoder_dir), ["rte"], source=str(data_dir), output_dir=tmp_path / "out")
    assert len(calls) == 2
    assert not (tmp_path / "out").exists()


def test_interrupting_while_drawing_leaves_nothing_half_written(
    encoder_dir: Path, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = analyze_report._draw

    def draw_and_interrupt(*args: Any) -> None:
        assert draw(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(analyze_report, "_draw", draw_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        analyze(str(encoder_dir), ["rte"], source=str(data_dir), output_dir=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_whose_embeddings_are_never_finite_is_refused(
    encoder_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    model = BertModel.from_pretrained(encoder_dir)
    with torch.no_grad():
        model.embeddings.LayerNorm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "nan")
    BertTokenizerFast.from_pretrained(encoder_dir).save_pretrained(tmp_path / "nan")
    with pytest.raises(IsobnError, match="no embedding of RTE is finite") as caught:
        analyze(str(tmp_path / "nan"), ["rte"], source=str(data_dir), output_dir=tmp_path / "out")
    assert caught.value.exit_code == 1 and not (tmp_path / "out").exists()


def test_a_run_folder_is_analyzed_on_its_own_data(run_dir: Path, data_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(f"task: rte\ndata: {{source: {data_dir}}}\n")
    assert analyze(str(run_dir), ["rte"]).source == str(data_dir)


REAL = {  # first 3000 training rows, or all 2490: norm to EV_1, EV_2, EV_3
    "cola": {
        "none": (0.0621, 0.1123, 0.1443),
        "batchnorm": (0.0577, 0.1045, 0.1354),
        "isobn": (0.0563, 0.1031, 0.1343),
    },
    "mrpc": {
        "none": (0.0441, 0.0703, 0.0921),
        "batchnorm": (0.0413, 0.0666, 0.0877),
        "isobn": (0.0411, 0.0668, 0.0883),
    },
    "rte": {"none": (0.0397, 0.0681, 0.0928), "batchnorm": (0.0375, 0.0653, 0.0898), "isobn": (0.0376, 0.0653, 0.0896)},
    "stsb": {
        "none": (0.0541, 0.0970, 0.1342),
        "batchnorm": (0.0501, 0.0906, 0.1272),
        "isobn": (0.0492, 0.0901, 0.1264),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(REAL))
def test_a_real_small_bert_gives_the_known_values(task: str) -> None:
    """all-MiniLM-L6-v2 with its pooler weights on real GLUE; computed once with plain transformers and numpy."""
    model, data = os.environ.get("ISOBN_SMALL_BERT"), os.environ.get("ISOBN_GLUE_DIR")
    if not model or not data:
        pytest.skip("set ISOBN_SMALL_BERT and ISOBN_GLUE_DIR")
    analysis = analyze(model, [task], source=data, max_rows=3000, representation="pooler")
    measures = analysis.to_json()[task]
    for norm, expected in REAL[task].items():
        np.testing.assert_allclose([measures[norm][f"ev{k}"] for k in (1, 2, 3)], expected, rtol=0, atol=2e-4)
    assert any("already near-isotropic" in note for note in analyze_report.list_notes(analysis))
