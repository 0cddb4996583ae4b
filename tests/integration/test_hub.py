"""The hub for real: the clients speak HTTP with a stand-in server, first online, then with it gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TESTS = Path(__file__).resolve().parents[1]

HELPERS = """
import json, os, sys, time, urllib.request
from pathlib import Path
from isobn_finetune import hub
from isobn_finetune.data import load_splits
from isobn_finetune.errors import ConfigError
from isobn_finetune.tasks import TASKS
import datasets, huggingface_hub

out = {}

def control(what, data=None):
    body = None if data is None else json.dumps(data).encode()
    with urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/__hub__/{what}", data=body) as answer:
        return json.loads(answer.read() or b"null")

def faults(**kind):
    control("faults", {"fail_first": 0, "fail_rate": 0, "fail_mode": "503", "fail_match": None, **kind})

def timed(name, action):
    start = time.monotonic()
    try:
        result = action()
    except ConfigError as error:
        result = {"error": str(error)}
    out[name], out[name + " seconds"] = result, time.monotonic() - start

def rows(task, splits=None):
    return {split: data.to_list() for split, data in load_splits(TASKS[task], "hub", splits).items()}

def model(name):
    folder = hub.resolve_model(name)
    return {"folder": str(folder), "files": sorted(file.name for file in folder.iterdir())}
"""


class Hub:
    """A stand-in hub in a process of its own."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "local_hub.py"), "--root", str(root)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def run_client(folder: Path, url: str, script: str, **env: str) -> dict[str, Any]:
    """Runs a script in its own process, since the clients read their settings when they are imported."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    work = folder / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", HELPERS + textwrap.dedent(script) + "\nprint(json.dumps(out))"],
        capture_output=True,
        text=True,
        cwd=work,
        timeout=120,
        env={
            **inherited,
            "PYTHONPATH": str(TESTS.parent),
            "HF_ENDPOINT": url,
            "HF_HOME": str(folder / "home"),
            "NO_PROXY": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            **env,
        },
    )
    assert done.returncode == 0, done.stderr
    return {"stderr": done.stderr, **json.loads(done.stdout.splitlines()[-1])}


GLUE = {
    "rte": ("sentence1", "sentence2", ["entailment", "not_entailment"]),
    "mrpc": ("sentence1", "sentence2", ["not_equivalent", "equivalent"]),
    "stsb": ("sentence1", "sentence2", None),
}
LABELS = {
    "rte": {"train": [0, 1, 1], "validation": [1, 0], "test": [-1, -1]},
    "mrpc": {"train": [1, 0], "validation": [1], "test": [0, 1]},
    "stsb": {"train": [3.8, 0.0], "validation": [5.0], "test": [-1.0]},
}


def make_glue(folder: Path) -> None:
    info, configs = [], []
    for name, (first, second, classes) in GLUE.items():
        (folder / name).mkdir(parents=True)
        label = {"names": classes, "_type": "ClassLabel"} if classes else {"dtype": "float32", "_type": "Value"}
        text = {"dtype": "string", "_type": "Value"}
        features = {first: text, second: text, "label": label, "idx": {"dtype": "int32", "_type": "Value"}}
        for split, labels in LABELS[name].items():
            table = pa.table(
                {
                    first: [f"{name} {split} {i} first" for i in range(len(labels))],
                    second: [f"{name} {split} {i} second" for i in range(len(labels))],
                    "label": pa.array(labels, pa.int64() if classes else pa.float32()),
                    "idx": pa.array([i + 40 for i in range(len(labels))], pa.int32()),
                }
            ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
            pq.write_table(table, folder / name / f"{split}-00000-of-00001.parquet")
        dtype = {"class_label": {"names": dict(enumerate(classes))}} if classes else "float32"
        columns = [{"name": first, "dtype": "string"}, {"name": second, "dtype": "string"}]
        columns += [{"name": "label", "dtype": dtype}, {"name": "idx", "dtype": "int32"}]
        splits = [{"name": split, "num_examples": len(labels)} for split, labels in LABELS[name].items()]
        info.append({"config_name": name, "features": columns, "splits": splits})
        files = [{"split": split, "path": f"{name}/{split}-*"} for split in LABELS[name]]
        configs.append({"config_name": name, "data_files": files})
    card = json.dumps({"dataset_info": info, "configs": configs})  # JSON is YAML
    (folder / "README.md").write_text(f"---\n{card}\n---\n# Invented rows\n")


def make_models(root: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "text"]
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )
    vocab = root / "vocab.txt"
    vocab.parent.mkdir(parents=True, exist_ok=True)
    vocab.write_text("\n".join(words) + "\n")
    tokenizer = BertTokenizerFast(vocab=str(vocab))
    for name in ("org/safe", "org/sharded", "org/pickled", "org/bare", "org/private", "org/two-step", "short-name"):
        folder = root / "models" / name
        model.save_pretrained(folder, max_shard_size="3KB" if name == "org/sharded" else "1GB")
        if name != "org/bare":
            tokenizer.save_pretrained(folder)
    for name in ("tf_model.h5", "flax_model.msgpack", "pytorch_model.bin", "onnx/model.onnx"):
        path = root / "models" / "org" / "safe" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not to be fetched")
    pickled = root / "models" / "org" / "pickled"
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    (root / "models" / "org" / "private" / ".hub.json").write_text('{"private": true}')


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """One client online while the hub stumbles, then the same folder with the hub gone."""
    folder = tmp_path_factory.mktemp("hub")
    make_glue(folder / "root" / "datasets" / "nyu-mll" / "glue")
    make_models(folder / "root")
    # Folders that must not be taken for the data set or the model.
    for stray in ("glue", "nyu-mll/glue", "org/safe"):
        (folder / "work" / stray).mkdir(parents=True)
        (folder / "work" / stray / "notes.txt").write_text("not what you look for")
    server = Hub(folder / "root")
    try:
        online = run_client(folder, server.url, ONLINE)
    finally:
        server.stop()
    yield {"folder": folder, "url": server.url, "online": online}


ONLINE = """
from transformers import AutoModel, AutoTokenizer

hub._WAITS = (0.05, 0.05)
faults(fail_first=2, fail_mode="503")
timed("rte", lambda: rows("rte"))
faults(fail_first=2, fail_mode="reset", fail_match="parquet")
timed("stsb", lambda: rows("stsb", ["train", "validation", "test"]))
faults()
timed("mrpc test", lambda: rows("mrpc", ["test"]))
faults(fail_first=2, fail_mode="503")
timed("safe", lambda: model("org/safe"))
faults(fail_first=1, fail_mode="reset", fail_match="safetensors")
timed("sharded", lambda: model("org/sharded"))
faults()
timed("pickled", lambda: model("org/pickled"))
timed("short", lambda: model("short-name"))
timed("bare", lambda: model("org/bare"))
timed("private", lambda: model("org/private"))
timed("unknown model", lambda: model("org/nothing"))
timed("unknown short model", lambda: model("nothing"))
timed("unknown config", lambda: rows("wnli"))
hub.GLUE_DATASET, known = "org/no-glue", hub.GLUE_DATASET
timed("unknown data set", lambda: rows("rte"))
hub.GLUE_DATASET = known
faults(fail_rate=1, fail_mode="503")
timed("always 503", lambda: model("org/two-step"))
timed("always 503 data", lambda: rows("qqp"))
faults()

# What transformers itself fetched is found in the cache, and what it left out is fetched.
AutoModel.from_pretrained("org/two-step")
snapshot = Path(huggingface_hub.try_to_load_from_cache("org/two-step", "config.json")).parent
out["half"] = [hub.find_missing_file(snapshot)]
timed("completed", lambda: model("org/two-step"))
control("log", {})
timed("again", lambda: [model(name) for name in ("org/two-step", "org/safe")] and rows("rte"))
out["requests when all is cached"] = [entry["path"] for entry in control("log")]

loaded = AutoModel.from_pretrained(out["safe"]["folder"], local_files_only=True)
tokenizer = AutoTokenizer.from_pretrained(out["safe"]["folder"], local_files_only=True)
out["hidden"] = list(loaded(**tokenizer("some text", return_tensors="pt")).last_hidden_state.shape)
sharded = AutoModel.from_pretrained(out["sharded"]["folder"], local_files_only=True)
out["same weights"] = all((a == b).all().item() for a, b in zip(loaded.parameters(), sharded.parameters()))
"""


def test_glue_comes_from_the_hub_though_the_first_answers_are_503(visit: dict[str, Any]) -> None:
    rows = visit["online"]["rte"]
    assert {split: [row["label"] for row in data] for split, data in rows.items()} == LABELS["rte"]
    assert rows["train"][1] == {
        "sentence1": "rte train 1 first",
        "sentence2": "rte train 1 second",
        "label": 1,
        "idx": 1,
    }


def test_download_goes_on_after_a_connection_reset(visit: dict[str, Any]) -> None:
    rows = visit["online"]["stsb"]
    assert {split: [row["label"] for row in data] for split, data in rows.items()} == LABELS["stsb"]


def test_published_test_labels_are_kept(visit: dict[str, Any]) -> None:
    assert [row["label"] for row in visit["online"]["mrpc test"]["test"]] == LABELS["mrpc"]["test"]


def test_model_is_fetched_without_weights_of_other_frameworks(visit: dict[str, Any]) -> None:
    files = visit["online"]["safe"]["files"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert not {"tf_model.h5", "flax_model.msgpack", "pytorch_model.bin", "onnx"} & set(files)
    assert visit["online"]["hidden"] == [1, 4, 8]


def test_sharded_weights_are_fetched_whole(visit: dict[str, Any]) -> None:
    files = visit["online"]["sharded"]["files"]
    assert "model.safetensors.index.json" in files
    assert sum(file.startswith("model-0") for file in files) > 1
    assert visit["online"]["same weights"]


def test_pickled_weights_are_taken_where_there_are_no_others(visit: dict[str, Any]) -> None:
    assert "pytorch_model.bin" in visit["online"]["pickled"]["files"]
    assert "model.safetensors" in visit["online"]["short"]["files"]


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("unknown model", ["--model org/nothing", "not public", "HF_TOKEN", "--model FOLDER"]),
        ("unknown short model", ["--model nothing", "no such folder", "--model tiny"]),
        ("private", ["--model org/private", "not public", "HF_TOKEN"]),
        ("bare", ["--model org/bare", "lacks tokenizer.json"]),
        ("unknown config", ["--data hub", "wnli", "--data FOLDER"]),
        ("unknown data set", ["--data hub", "org/no-glue", "not public", "--data demo"]),
        ("always 503", ["--model org/two-step", "status 503", "Try later"]),
        ("always 503 data", ["--data hub", "qqp", "status 503", "Try later"]),
    ],
)
def test_what_cannot_be_had_is_one_line_that_says_what_to_do(
    visit: dict[str, Any], what: str, parts: list[str]
) -> None:
    message = visit["online"][what]["error"]
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert visit["online"][what + " seconds"] < 5


def test_cache_of_transformers_is_completed_then_used(visit: dict[str, Any]) -> None:
    assert visit["online"]["half"] == ["tokenizer.json"]
    assert "tokenizer.json" in visit["online"]["completed"]["files"]


def test_nothing_is_asked_of_the_hub_when_all_is_cached(visit: dict[str, Any]) -> None:
    assert visit["online"]["again"] == visit["online"]["rte"]
    assert visit["online"]["requests when all is cached"] == []


def test_clients_chatter_stays_off_the_terminal(visit: dict[str, Any]) -> None:
    for noise in ("Fetching", "examples/s", "Retrying in", "latest cached version", "Traceback"):
        assert noise not in visit["online"]["stderr"]


GONE = """
timed("rte", lambda: rows("rte"))
timed("stsb", lambda: rows("stsb"))
timed("safe", lambda: model("org/safe"))
timed("short", lambda: model("short-name"))
timed("not cached", lambda: rows("wnli"))
timed("no model", lambda: model("org/nothing"))
"""


@pytest.mark.parametrize(
    ("env", "reason"),
    [({}, "cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE allows no download")],
    ids=["hub gone", "offline by setting"],
)
def test_cache_serves_without_any_delay_when_the_hub_is_gone(
    visit: dict[str, Any], env: dict[str, str], reason: str
) -> None:
    gone = run_client(visit["folder"], visit["url"], GONE, **env)
    for name in ("rte", "stsb", "safe", "short"):
        assert gone[name] == visit["online"][name]
    for name in ("not cached", "no model"):
        assert reason in gone[name]["error"]
        assert "\n" not in gone[name]["error"]
    # Asking again, as the clients do, would take 23 s or more for each.
    assert sum(value for key, value in gone.items() if key.endswith(" seconds")) < 4
    assert gone["stderr"] == ""
