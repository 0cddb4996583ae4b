from __future__ import annotations

import pytest
import torch
from torch import nn

from isobn_finetune.cpu_dropout import CheapDropout, DropoutRate, draw_noise, drop, use_cheap_dropout

EVERY_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def zeros(x: torch.Tensor) -> torch.Tensor:
    return x == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("p", [0.0, 1e-5, 0.05, 0.1, 0.25, 0.49, 0.5, 0.6, 0.9, 0.99])
def test_the_share_of_random_patterns_that_drop_is_p_to_3e_5(p: float, dtype: torch.dtype) -> None:
    rate = DropoutRate(p)
    dropped = zeros(drop(torch.ones(2**16, dtype=dtype), EVERY_PATTERN, rate)).double().mean().item()
    assert dropped == pytest.approx(p, abs=3e-5)
    assert rate.keep_scale * (1 - dropped) == pytest.approx(1.0, abs=1e-12)


def test_the_measured_rate_is_p_to_1e_4() -> None:
    torch.manual_seed(0)
    dropout, count = CheapDropout(0.1), 0
    for _ in range(40):  # 40 million draws: the standard deviation of the rate is 4.7e-5
        count += int(zeros(dropout(torch.ones(1_000_000))).sum())
    assert count / 4e7 == pytest.approx(6554 / 65536, abs=1.5e-4)


def test_drops_are_independent_of_neighbours_rows_and_calls() -> None:
    torch.manual_seed(1)
    dropout = CheapDropout(0.1)
    first, second = (zeros(dropout(torch.ones(2000, 1000))).double() for _ in range(2))
    spread = 0.1 * 0.9
    pairs = [(first, second), (first[1:], first[:-1])]
    pairs += [(first[:, shift:], first[:, :-shift]) for shift in (1, 2, 3, 4, 5, 8)]
    for left, right in pairs:
        covariance = (left * right).mean() - left.mean() * right.mean()
        # Over two million pairs an independent draw stays within 4 / sqrt(2e6).
        assert abs(covariance / spread) < 0.003


def test_the_stream_repeats_with_the_seed_and_with_a_restored_state() -> None:
    dropout, x = CheapDropout(0.2), torch.ones(300, 7)
    torch.manual_seed(3)
    first = dropout(x)
    state = torch.get_rng_state()
    second = dropout(x)
    torch.manual_seed(3)
    assert torch.equal(dropout(x), first)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradient_goes_through_the_kept_elements_with_their_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = torch.randn(50, 9, dtype=dtype).requires_grad_()
    y = CheapDropout(0.3)(x)
    y.backward(torch.ones_like(y))
    scale = DropoutRate(0.3).keep_scale
    kept = y != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(x.grad, kept.to(dtype) * scale)
    torch.testing.assert_close(y, kept.to(dtype) * x.detach() * scale)


def test_not_finite_values_pass_where_they_are_kept() -> None:
    torch.manual_seed(5)
    y = CheapDropout(0.1)(torch.full((10_000,), float("nan")))
    assert y.isnan().double().mean().item() == pytest.approx(0.9, abs=0.02)
    assert zeros(y[~y.isnan()]).all()


def test_evaluation_and_p_zero_leave_the_input_alone_and_draw_nothing() -> None:
    x, state = torch.randn(5), torch.get_rng_state()
    assert CheapDropout(0.5).eval()(x) is x
    assert CheapDropout(0.0)(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("p", "dtype"), [(0.999, torch.float32), (1.0, torch.float32), (0.1, torch.float16)])
def test_what_the_trick_cannot_do_falls_back_to_torch(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    y = CheapDropout(p)(torch.ones(20_000, dtype=dtype))
    assert zeros(y).double().mean().item() == pytest.approx(p, abs=0.02)


def test_a_rate_that_would_keep_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must lie between 0 and 0.996"):
        DropoutRate(1.0)


def test_p_set_after_construction_counts() -> None:
    dropout = CheapDropout(0.1)
    dropout.p = 0.4
    torch.manual_seed(7)
    assert zeros(dropout(torch.ones(100_000))).double().mean().item() == pytest.approx(0.4, abs=0.01)


def test_noise_has_the_asked_shape_for_sizes_that_four_does_not_divide() -> None:
    for shape in [(1,), (3, 5), (0,), (7, 1, 3)]:
        assert draw_noise(shape).shape == shape


def test_use_cheap_dropout_replaces_every_dropout_and_keeps_the_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3))).eval()
    keys = list(model.state_dict())
    assert use_cheap_dropout(model) == 2
    kinds = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert [type(module) for module in kinds] == [CheapDropout] * 2
    assert [module.p for module in kinds] == [0.2, 0.3]
    assert not any(module.training for module in kinds)
    assert list(model.state_dict()) == keys
    assert use_cheap_dropout(model) == 0
