from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from isobn_finetune.data import load_splits
from isobn_finetune.encoding import PaddingCollator, check_vocabulary, encode, limit_length
from isobn_finetune.errors import ConfigError
from isobn_finetune.families import FAMILIES
from isobn_finetune.tasks import TASKS


@pytest.fixture(scope="module")
def tokenizer(bert_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(bert_dir)


@pytest.fixture(scope="module")
def features(glue_dir: Path, tokenizer: Any) -> list[dict[str, Any]]:
    return encode(load_splits(TASKS["rte"], str(glue_dir))["train"], TASKS["rte"], tokenizer, 32)


def test_rows_keep_their_order_and_a_pair_has_two_segments(features: list[dict[str, Any]], tokenizer: Any) -> None:
    assert len(features) == 8
    text = tokenizer.decode(features[1]["input_ids"])
    assert text == "[CLS] the young goat sleeps by the road. [SEP] no goat sleeps by the road. [SEP]"
    first = features[1]["input_ids"].index(tokenizer.sep_token_id) + 1
    types = features[1]["token_type_ids"]
    assert types == [0] * first + [1] * (len(types) - first)
    assert [feature["labels"] for feature in features] == [0, 1, 1, 0, 1, 1, 0, 1]


def test_a_single_sentence_is_one_segment(glue_dir: Path, tokenizer: Any) -> None:
    rows = load_splits(TASKS["cola"], str(glue_dir))["validation"]
    encoded = encode(rows, TASKS["cola"], tokenizer, 32)
    assert all(set(feature["token_type_ids"]) == {0} for feature in encoded)


def test_scores_stay_real_numbers(glue_dir: Path, tokenizer: Any) -> None:
    rows = load_splits(TASKS["stsb"], str(glue_dir))["train"]
    assert [feature["labels"] for feature in encode(rows, TASKS["stsb"], tokenizer, 32)][:3] == [5.0, 1.5, 0.7]


@pytest.mark.parametrize("max_length", [5, 8, 13])
def test_long_rows_are_cut_to_the_length_and_keep_their_special_tokens(
    glue_dir: Path, tokenizer: Any, max_length: int
) -> None:
    rows = load_splits(TASKS["rte"], str(glue_dir))["train"]
    for feature in encode(rows, TASKS["rte"], tokenizer, max_length):
        ids = feature["input_ids"]
        assert len(ids) <= max_length and ids[0] == tokenizer.cls_token_id
        assert ids.count(tokenizer.sep_token_id) == 2 and ids[-1] == tokenizer.sep_token_id


def test_no_rows_are_no_features(glue_dir: Path, tokenizer: Any) -> None:
    rows = load_splits(TASKS["rte"], str(glue_dir))["train"].select([])
    assert encode(rows, TASKS["rte"], tokenizer, 32) == []


def test_empty_texts_are_rows_too(tokenizer: Any) -> None:
    rows = {"sentence1": ["", "a dog"], "sentence2": ["", ""], "label": [0, 1]}
    encoded = encode(rows, TASKS["rte"], tokenizer, 32)
    assert [len(feature["input_ids"]) for feature in encoded] == [3, 5]


def test_a_batch_is_padded_to_its_longest_row_only(features: list[dict[str, Any]], tokenizer: Any) -> None:
    collate = PaddingCollator(tokenizer)
    batch = collate([features[0], features[2]])
    longest = max(len(features[0]["input_ids"]), len(features[2]["input_ids"]))
    assert batch["input_ids"].shape == (2, longest)
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(features[n]["input_ids"]) for n in (0, 2)]
    assert batch["labels"].tolist() == [0, 1]
    assert (collate.real_tokens, collate.all_tokens) == (int(batch["attention_mask"].sum()), 2 * longest)


def test_more_tokens_than_positions_are_cut_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    class Config:
        max_position_embeddings = 66
        pad_token_id = 1

    with caplog.at_level(logging.INFO):
        assert limit_length(64, FAMILIES["roberta"], Config) == 64
        assert not caplog.records
        assert limit_length(65, FAMILIES["roberta"], Config) == 64
    assert len(caplog.records) == 1 and "cut at 64 tokens" in caplog.text


def test_tokens_without_embeddings_are_refused(features: list[dict[str, Any]], tokenizer: Any) -> None:
    check_vocabulary(features, tokenizer, len(tokenizer))
    highest = max(max(feature["input_ids"]) for feature in features)
    check_vocabulary(features, tokenizer, highest + 1)  # a few unused tokens too many do no harm
    with pytest.raises(ConfigError, match=f"gives token {highest}"):
        check_vocabulary(features, tokenizer, highest)
