from __future__ import annotations

from types import SimpleNamespace

import pytest

from isobn_finetune.errors import ConfigError
from isobn_finetune.families import FAMILIES, get_family


def test_the_families_are_those_that_the_issue_names() -> None:
    assert set(FAMILIES) == {
        "bert", "roberta", "electra", "albert", "distilbert", "deberta-v2", "mpnet", "xlm-roberta", "modernbert",
    }  # fmt: skip


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'gpt2' is not supported. Known: bert, roberta"):
        get_family("gpt2")


@pytest.mark.parametrize(
    ("family", "values", "limit"),
    [
        ("bert", {"max_position_embeddings": 512, "pad_token_id": 0}, 512),
        ("roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("xlm-roberta", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("mpnet", {"max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ("deberta-v2", {"max_position_embeddings": 512, "position_biased_input": False}, None),
        ("deberta-v2", {"max_position_embeddings": 512, "position_biased_input": True}, 512),
    ],
)
def test_the_longest_row_counts_the_positions_that_padding_takes(family: str, values: dict, limit: int | None) -> None:
    assert FAMILIES[family].get_max_length(SimpleNamespace(**values)) == limit


def test_the_classifiers_own_dropout_wins_where_it_is_set() -> None:
    values = {"classifier_dropout": None, "hidden_dropout_prob": 0.1}
    assert FAMILIES["bert"].get_dropout(SimpleNamespace(**values)) == 0.1
    assert FAMILIES["bert"].get_dropout(SimpleNamespace(**values | {"classifier_dropout": 0.0})) == 0.0


def test_an_activation_is_read_from_the_config_where_the_family_has_one() -> None:
    assert FAMILIES["deberta-v2"].get_activation(SimpleNamespace(pooler_hidden_act="gelu")) == "gelu"
    assert FAMILIES["bert"].get_activation(SimpleNamespace()) == "tanh"
