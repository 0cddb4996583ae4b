from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedModel

from isobn_finetune.packed_attention import PackedSequences, split_by_length
from isobn_finetune.packing import PackingCollator, prepare_for_packing, supports_packing

VOCABULARY, MAX_LENGTH = 60, 40
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_LENGTH + 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": SHAPE,
    "roberta": SHAPE | {"type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": SHAPE | {"type_vocab_size": 1, "pad_token_id": 1},
    "electra": SHAPE | {"embedding_size": 16},
    "albert": SHAPE | {"embedding_size": 16},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": MAX_LENGTH,
    },
    # Local attention of 8 tokens either way in all layers but each third: shorter than most rows.
    "modernbert": SHAPE | {"local_attention": 16, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
}


def create_encoder(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    encoder = AutoModel.from_config(AutoConfig.for_model(family, **CONFIGS[family]))
    with torch.no_grad():  # as drawn, tiny models attend to everything alike, and hide a wrong mask
        for name, parameter in encoder.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0 if "embedding" in name else 6.0)
    return encoder.eval()


def create_rows(family: str, lengths: list[int]) -> list[dict[str, Any]]:
    draw = random.Random(len(lengths))
    rows = []
    for length in lengths:
        row = {"input_ids": [draw.randrange(5, VOCABULARY) for _ in range(length)], "labels": draw.randrange(3)}
        if family in ("bert", "electra", "albert"):
            row["token_type_ids"] = [0] * (length // 2) + [1] * (length - length // 2)
        rows.append(row)
    return rows


def pad(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    filling = {"input_ids": pad_token_id, "token_type_ids": 0}
    batch = {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
        for name, value in filling.items()
        if name in rows[0]
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


def first_tokens_padded(encoder: PreTrainedModel, rows: list[dict[str, Any]]) -> Tensor:
    return encoder(**pad(rows, encoder.config.pad_token_id)).last_hidden_state[:, 0]


def first_tokens_packed(encoder: PreTrainedModel, rows: list[dict[str, Any]]) -> Tensor:
    batch = PackingCollator(encoder.config)(rows)
    batch.pop("labels")
    offsets, max_length = batch.pop("cu_seqlens"), batch.pop("max_length")
    hidden = encoder(**batch, packed=PackedSequences(offsets, max_length)).last_hidden_state
    return hidden[0].index_select(0, offsets[:-1])


def loss_and_gradients(
    encoder: PreTrainedModel, head: nn.Linear, first_tokens: Tensor, rows: list[dict[str, Any]]
) -> tuple[Tensor, dict[str, Tensor]]:
    encoder.zero_grad()
    loss = F.cross_entropy(head(first_tokens), torch.tensor([row["labels"] for row in rows]))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in encoder.named_parameters() if p.grad is not None}


LENGTHS = {
    "random": [random.Random(5).randrange(2, MAX_LENGTH) for _ in range(16)],
    "one and the longest": [1, MAX_LENGTH, 1, 7, MAX_LENGTH],
    "one row": [9],
    "one token": [1],
    "all alike": [11] * 6,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("family", CONFIGS)
def test_packed_and_padded_batches_give_the_same_loss_gradients_and_vectors(family: str, lengths: list[int]) -> None:
    encoder, head = create_encoder(family), nn.Linear(32, 3)
    rows = create_rows(family, lengths)
    padded = first_tokens_padded(encoder, rows)
    padded_loss, padded_gradients = loss_and_gradients(encoder, head, padded, rows)
    assert prepare_for_packing(encoder)
    packed = first_tokens_packed(encoder, rows)
    packed_loss, packed_gradients = loss_and_gradients(encoder, head, packed, rows)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed_loss, padded_loss, atol=1e-5, rtol=0)
    # A pooler of the encoder's own sees token 0 of the row alone; it is not in this loss.
    assert packed_gradients.keys() == padded_gradients.keys()
    for name, gradient in packed_gradients.items():
        largest = max(float(padded_gradients[name].abs().max()), 1.0)
        torch.testing.assert_close(gradient, padded_gradients[name], atol=1e-5 * largest, rtol=1e-5, msg=name)


@pytest.mark.parametrize("family", CONFIGS)
def test_evaluation_without_gradients_gives_the_same_vectors(family: str) -> None:
    encoder, rows = create_encoder(family), create_rows(family, LENGTHS["random"])
    with torch.inference_mode():
        padded = first_tokens_padded(encoder, rows)
        prepare_for_packing(encoder)
        torch.testing.assert_close(first_tokens_packed(encoder, rows), padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_padded_batches_still_work_on_a_prepared_encoder(family: str) -> None:
    encoder, rows = create_encoder(family), create_rows(family, LENGTHS["random"])
    alone = {name: tensor[:1] for name, tensor in pad(rows, 0).items() if name != "attention_mask"}
    with torch.no_grad():
        padded, unmasked = first_tokens_padded(encoder, rows), encoder(**alone).last_hidden_state
        prepare_for_packing(encoder)
        torch.testing.assert_close(first_tokens_padded(encoder, rows), padded, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(encoder(**alone).last_hidden_state, unmasked, atol=1e-6, rtol=1e-6)


def test_a_sequence_does_not_see_its_neighbours_in_the_row() -> None:
    encoder, rows = create_encoder("bert"), create_rows("bert", [7, 12, 9])
    prepare_for_packing(encoder)
    with torch.no_grad():
        together = first_tokens_packed(encoder, rows)
        other = create_rows("bert", [5, 12])
        with_others = first_tokens_packed(encoder, [other[0], rows[1], other[1]])
    torch.testing.assert_close(together[1], with_others[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_dropout_drops_weights_at_its_rate_and_repeats_with_the_seed(dtype: torch.dtype) -> None:
    encoder, rows = create_encoder("bert"), create_rows("bert", LENGTHS["random"])
    prepare_for_packing(encoder)
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    exact = first_tokens_packed(encoder, rows)
    for layer in encoder.encoder.layer:
        layer.attention.self.dropout.p = 0.1
    encoder.train()

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return first_tokens_packed(encoder, rows)

    torch.manual_seed(1)
    first, second = forward(), forward()
    torch.manual_seed(1)
    assert torch.equal(forward(), first)
    assert not torch.equal(first, second)
    assert not torch.allclose(first, exact, atol=1e-2)


def test_attention_dropout_leaves_the_expected_output_and_its_gradient_unchanged() -> None:
    from isobn_finetune.packed_attention import packed_attention

    torch.manual_seed(2)
    offsets, heads, width = torch.tensor([0, 3, 10]), 2, 4
    query, key, value = (torch.randn(1, heads, 10, width, requires_grad=True) for _ in range(3))
    packed = PackedSequences(offsets, 7)

    def attend(dropout: float) -> tuple[Tensor, Tensor]:
        output, _ = packed_attention(nn.Module(), query, key, value, None, dropout=dropout, packed=packed)
        (gradient,) = torch.autograd.grad(output.square().sum() + output.sum(), value)
        return output.detach(), gradient

    exact, _ = attend(0.0)
    draws = torch.stack([attend(0.2)[0] for _ in range(4000)])
    error = draws.std(0) / 4000**0.5
    assert ((draws.mean(0) - exact).abs() / (error + 1e-7)).max() < 5.0
    assert error.min() > 0


def test_attention_with_dropout_has_the_gradient_of_what_it_computed() -> None:
    from isobn_finetune.packed_attention import packed_attention

    torch.manual_seed(3)
    packed = PackedSequences(torch.tensor([0, 1, 4, 10, 16]), 6)
    query, key, value = (torch.randn(1, 2, 16, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(*states: Tensor) -> Tensor:
        torch.manual_seed(4)
        output, _ = packed_attention(nn.Module(), *states, None, dropout=0.3, packed=packed, sliding_window=3)
        return output

    assert torch.autograd.gradcheck(attend, (query, key, value))


def test_the_nested_tensors_that_a_gpu_takes_give_the_same_attention() -> None:
    from isobn_finetune.packed_attention import _attend_on_gpu, packed_attention

    torch.manual_seed(5)
    packed = PackedSequences(torch.tensor([0, 1, 4, 10, 16]), 6)
    query, key, value = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    expected, _ = packed_attention(nn.Module(), query, key, value, None, scaling=0.5, packed=packed)
    rows = (states[0].transpose(0, 1) for states in (query, key, value))
    got = _attend_on_gpu(*rows, packed, scaling=0.5, window=None, dropout=0.0)
    assert got is not None
    torch.testing.assert_close(got.unsqueeze(0), expected)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weight).sum(), (query, key, value)) for out in (expected, got[None])]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_gradient_checkpointing_gives_the_same_gradients_with_dropout() -> None:
    encoder, head, rows = create_encoder("bert"), nn.Linear(32, 3), create_rows("bert", LENGTHS["random"])
    prepare_for_packing(encoder)
    encoder.train()
    torch.manual_seed(1)
    _, plain = loss_and_gradients(encoder, head, first_tokens_packed(encoder, rows), rows)
    encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    _, recomputed = loss_and_gradients(encoder, head, first_tokens_packed(encoder, rows), rows)
    assert plain.keys() == recomputed.keys()
    for name, gradient in recomputed.items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["mpnet", "deberta-v2"])
def test_families_without_pluggable_attention_fall_back(family: str) -> None:
    encoder = AutoModel.from_config(AutoConfig.for_model(family, **SHAPE))
    before = encoder.config._attn_implementation
    assert not supports_packing(encoder.config)
    assert not prepare_for_packing(encoder)
    assert encoder.config._attn_implementation == before


def test_the_attention_implementation_is_not_saved(tmp_path: Any) -> None:
    encoder = create_encoder("bert")
    prepare_for_packing(encoder)
    encoder.save_pretrained(tmp_path)
    assert "isobn_packed" not in (tmp_path / "config.json").read_text()


def test_collator_lays_rows_one_after_another() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 0, 1], "labels": 1},
        {"input_ids": [8], "token_type_ids": [0], "labels": 0},
        {"input_ids": [9, 4], "token_type_ids": [0, 1], "labels": 2},
    ]
    collate = PackingCollator(AutoConfig.for_model("bert"))
    batch = collate(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1, 0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert batch["labels"].tolist() == [1, 0, 2]
    assert batch["max_length"] == 3
    assert (collate.real_tokens, collate.all_tokens) == (6, 6)


def test_collator_keeps_real_valued_labels_and_does_without_labels() -> None:
    collate = PackingCollator(AutoConfig.for_model("roberta", pad_token_id=1, type_vocab_size=1))
    batch = collate([{"input_ids": [5, 6], "labels": 0.7}, {"input_ids": [7], "labels": 5.0}])
    assert batch["labels"].tolist() == pytest.approx([0.7, 5.0])
    assert batch["position_ids"].tolist() == [[2, 3, 2]]
    assert "labels" not in collate([{"input_ids": [5], "token_type_ids": [0]}])
    assert "token_type_ids" not in collate([{"input_ids": [5], "token_type_ids": [0]}])


def test_groups_hold_every_sequence_once_and_cost_least() -> None:
    draw = random.Random(0)
    for _ in range(50):
        lengths = [draw.randrange(1, 50) for _ in range(7)]
        groups = split_by_length(lengths, group_cost=300)
        assert sorted(place for group in groups for place in group) == list(range(7))

        def cost(groups: list[list[int]], lengths: list[int] = lengths) -> int:
            return sum(300 + len(group) * max(lengths[place] for place in group) ** 2 for group in groups)

        order = sorted(range(7), key=lambda place: -lengths[place])
        cuts = ([place for place in range(1, 7) if bits >> (place - 1) & 1] for bits in range(64))
        every = ([order[a:b] for a, b in zip([0, *cut], [*cut, 7], strict=True)] for cut in cuts)
        assert cost(groups) == min(map(cost, every))
