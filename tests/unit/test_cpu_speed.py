from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from isobn_finetune.cpu_memory import keep_freed_memory
from isobn_finetune.mixed_precision import Bf16Linear, use_bf16_linear
from isobn_finetune.trained_rows import TrainedRowsEmbedding, train_all_rows, train_used_rows


def create_bert() -> BertModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=40, max_position_embeddings=16, **shape), add_pooling_layer=False)


def create_pair(bias: bool = True) -> tuple[nn.Linear, Bf16Linear]:
    torch.manual_seed(0)
    stock = nn.Linear(12, 7, bias=bias)
    holder = nn.Sequential(nn.Linear(12, 7, bias=bias))
    holder.load_state_dict({f"0.{name}": value for name, value in stock.state_dict().items()})
    assert use_bf16_linear(holder) == 1
    return stock, holder[0]


@pytest.mark.parametrize("bias", [True, False])
def test_bf16_linear_gives_what_autocast_gives(bias: bool) -> None:
    stock, ours = create_pair(bias)
    results = []
    for layer in (stock, ours):
        x = torch.linspace(-1, 1, 60).view(1, 5, 12).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        y.float().square().sum().backward()
        assert y.dtype is torch.bfloat16
        assert layer.weight.grad.dtype is x.grad.dtype is torch.float32
        results.append([y, x.grad, *(parameter.grad for parameter in layer.parameters())])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_bf16_linear_is_the_plain_layer_without_autocast() -> None:
    stock, ours = create_pair()
    x = torch.randn(3, 12)
    assert torch.equal(ours(x), stock(x))


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_linear_sees_every_change_of_its_weights(fused: bool) -> None:
    stock, ours = create_pair()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1, fused=fused)
    x = torch.randn(4, 12)

    def check() -> None:
        stock.load_state_dict(ours.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(ours(x), stock(x))

    check()
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            ours(x).float().sum().backward()
        optimizer.step()
        check()
    ours.load_state_dict({"weight": torch.ones(7, 12), "bias": torch.zeros(7)})
    check()


def test_bf16_linear_first_used_under_inference_mode_can_train_after() -> None:
    _, ours = create_pair()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            ours(torch.ones(1, 12))
        ours(torch.ones(1, 12)).sum().backward()
    assert ours.weight.grad is not None


def test_bf16_linear_casts_leave_no_trace_in_autograd() -> None:
    _, ours = create_pair()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = ours(torch.ones(1, 12))
        y.sum().backward()
        with torch.no_grad():
            ours.weight.add_(1.0)
    assert ours._half is not None
    assert not any(half.requires_grad for half in ours._half)


def test_use_bf16_linear_keeps_keys_and_parameters() -> None:
    encoder = create_bert()
    parameters = dict(encoder.named_parameters())
    assert use_bf16_linear(encoder) == 12
    assert all(parameter is parameters[name] for name, parameter in encoder.named_parameters())
    assert list(encoder.state_dict()) == list(create_bert().state_dict())


def train(encoder: BertModel, steps: int = 4) -> None:
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.05, weight_decay=0.0, fused=True)
    encoder.train()
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(5, 20, (3, 6), generator=draw)
        optimizer.zero_grad()
        encoder(input_ids=ids).last_hidden_state[:, 0].square().sum(-1).sqrt().sum().backward()
        optimizer.step()


def test_training_the_used_rows_alone_gives_the_weights_of_training_all() -> None:
    stock, ours = create_bert(), create_bert()
    assert train_used_rows(ours, range(5, 20)) == pytest.approx(16 / 40)  # and the row of the padding token
    assert dict(ours.named_parameters())["embeddings.word_embeddings.weight"].shape == (16, 16)
    train(stock)
    train(ours)
    expected = stock.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
    every_token = torch.arange(40).view(4, 10)
    with torch.no_grad():
        vectors = [encoder.eval()(input_ids=every_token).last_hidden_state for encoder in (stock, ours)]
    torch.testing.assert_close(vectors[1], vectors[0], atol=1e-5, rtol=1e-5)
    train_all_rows(ours)
    assert type(ours.get_input_embeddings()) is nn.Embedding
    torch.testing.assert_close(ours.state_dict(), expected, atol=1e-6, rtol=1e-5)


def test_trained_rows_load_a_full_state_dict_and_go_on_training_from_it() -> None:
    source, ours = create_bert(), create_bert()
    train(source)
    train_used_rows(ours, range(5, 20))
    ours.load_state_dict(source.state_dict())
    torch.testing.assert_close(ours.state_dict(), source.state_dict(), atol=0, rtol=0)
    embedding = ours.get_input_embeddings().train()
    assert torch.equal(embedding(torch.tensor([7, 12])), source.get_input_embeddings()(torch.tensor([7, 12])))


def test_trained_rows_refuse_a_table_of_another_size_and_a_missing_one() -> None:
    embedding = TrainedRowsEmbedding(nn.Embedding(6, 2), torch.tensor([True, False] * 3))
    with pytest.raises(RuntimeError, match=r"shape \(5, 2\), not \(6, 2\)"):
        embedding.load_state_dict({"weight": torch.zeros(5, 2)})
    with pytest.raises(RuntimeError, match="Missing key"):
        embedding.load_state_dict({})


def test_the_padding_row_gets_no_gradient() -> None:
    embedding = TrainedRowsEmbedding(nn.Embedding(6, 2, padding_idx=0), torch.tensor([True, True] + [False] * 4))
    embedding(torch.tensor([0, 1])).sum().backward()
    assert embedding.weight.grad.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_keeping_freed_memory_is_harmless_where_it_works_and_where_it_does_not() -> None:
    with keep_freed_memory() as works:
        assert isinstance(works, bool)
        assert float(torch.ones(10_000_000).sum()) == 1e7
    assert float(torch.ones(10_000_000).sum()) == 1e7
