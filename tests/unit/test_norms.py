from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from isobn_finetune.errors import ConfigError
from isobn_finetune.norms import NORMS, BatchNorm, Identity, IsoBN, create_norm

DATA = Path(__file__).parents[1] / "data"
STATISTICS_NORMS = (BatchNorm, IsoBN)


def draw_batches(steps: int = 12, batch: int = 6, width: int = 5, seed: int = 0) -> list[Tensor]:
    """Correlated batches with very different spreads and a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator)
    spread = torch.logspace(-2, 0.3, width)
    return [(torch.randn(batch, width, generator=generator) @ mix) * spread + spread for _ in range(steps)]


def train(norm: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    norm.train()
    return [norm(batch) for batch in batches]


def compute_isobn(
    batches: list[Any], momentum: float = 0.05, beta: float = 0.5, eps: float = 1e-3, bias_correction: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Running values and scale by a second route: float64, weighted sums in closed form, loops over dimensions."""
    width, steps = len(batches[0][0]), len(batches)
    cov, std = np.zeros((width, width)), np.zeros(width)
    for step, batch in enumerate(batches, start=1):
        x = np.asarray(batch, dtype=np.float64)
        weight = momentum * (1 - momentum) ** (steps - step)
        cov += weight * np.cov(x, rowvar=False, ddof=0)
        std += weight * np.std(x, axis=0)
    used_cov, used_std = cov, std
    if bias_correction:
        used_cov, used_std = (value / (1 - (1 - momentum) ** steps) for value in (cov, std))
    raw = np.ones(width)
    for i in range(width):
        squares = []
        for j in range(width):
            product = used_std[i] * used_std[j]
            rho = used_cov[i, j] / product if product > 0 else 0.0
            squares.append(min(1.0, max(-1.0, rho)) ** 2)
        raw[i] = (math.fsum(squares) / width * used_std[i] + eps) ** -beta
    before = math.fsum(np.diag(used_cov))
    after = math.fsum(raw[k] ** 2 * used_cov[k, k] for k in range(width))
    scale = raw * math.sqrt(before / (after + eps))
    return cov, std, np.where(used_std > 0, scale, 1.0)


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_isobn_equals_the_formula_by_a_second_route(steps: int, bias_correction: bool) -> None:
    batches = draw_batches(steps)
    norm = IsoBN(5, bias_correction=bias_correction)
    output = train(norm, batches)[-1]
    cov, std, scale = compute_isobn([batch.tolist() for batch in batches], bias_correction=bias_correction)
    np.testing.assert_allclose(norm.running_cov.numpy(), cov, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(norm.running_std.numpy(), std, rtol=1e-5)
    np.testing.assert_allclose(output.numpy(), batches[-1].double().numpy() * scale, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(norm.affine()[0].numpy(), scale, rtol=1e-5)


def reference_settings() -> list[Any]:
    """Our own file, and the authors' where a folder or file of it is named in the environment."""
    cases = json.loads((DATA / "isobn_reference.json").read_text(encoding="utf-8"))
    params = [pytest.param(case, id=f"own-{number}") for number, case in enumerate(cases)]
    named = os.environ.get("ISOBN_REFERENCE_FILE")
    if named is None:
        skip = pytest.mark.skip(reason="ISOBN_REFERENCE_FILE names no file of the authors' inputs and outputs")
        return [*params, pytest.param({}, id="authors", marks=skip)]
    path = Path(named) / "isobn_reference.json" if Path(named).is_dir() else Path(named)
    cases = json.loads(path.read_text(encoding="utf-8"))
    return params + [pytest.param(case, id=f"authors-{number}") for number, case in enumerate(cases)]


@pytest.mark.parametrize("case", reference_settings())
def test_isobn_meets_the_reference_to_1e_5(case: dict[str, Any]) -> None:
    norm = IsoBN(case["hidden_size"], momentum=case["momentum"], beta=case["beta"], eps=case["eps"])
    outputs = train(norm, [torch.tensor(batch) for batch in case["train_inputs"]])
    assert case["train_outputs"]
    for wanted in case["train_outputs"]:
        torch.testing.assert_close(outputs[wanted["step"] - 1], torch.tensor(wanted["output"]), atol=1e-5, rtol=1e-5)
    norm.eval()
    output = norm(torch.tensor(case["eval_input"]))
    torch.testing.assert_close(output, torch.tensor(case["eval_output"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm.running_std, torch.tensor(case["running_std"]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(norm.running_cov, torch.tensor(case["running_cov"]), atol=1e-5, rtol=1e-5)


def test_isobn_before_the_first_batch_is_the_identity() -> None:
    norm = IsoBN(4).eval()
    x = torch.randn(3, 4)
    assert torch.equal(norm(x), x)
    weight, shift = norm.affine()
    assert torch.equal(weight, torch.ones(4)) and torch.equal(shift, torch.zeros(4))


def test_isobn_with_beta_0_is_the_identity_up_to_eps() -> None:
    batches = draw_batches(60)
    norm = IsoBN(5, beta=0.0, eps=1e-6)
    torch.testing.assert_close(train(norm, batches)[-1], batches[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_isobn_keeps_the_total_variance_up_to_eps(beta: float) -> None:
    norm = IsoBN(5, beta=beta, eps=1e-9)
    train(norm, draw_batches(30))
    variance = norm.running_cov.diagonal()
    torch.testing.assert_close((norm.affine()[0].square() * variance).sum(), variance.sum(), rtol=1e-4, atol=0)


def test_isobn_damps_the_largest_dimension_most() -> None:
    norm = IsoBN(5)
    train(norm, draw_batches(30))
    scale = norm.affine()[0]
    assert scale.argmin() == norm.running_std.argmax() and scale.min() < 1 < scale.max()


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
def test_permuting_the_dimensions_permutes_the_output(kind: type[nn.Module]) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    batches = draw_batches()
    plain = train(kind(5), batches)[-1]
    permuted = train(kind(5), [batch[:, order] for batch in batches])[-1]
    torch.testing.assert_close(permuted, plain[:, order])


def test_no_gradient_flows_through_the_scale_of_isobn() -> None:
    norm = IsoBN(5)
    train(norm, draw_batches())
    x = draw_batches(1, seed=7)[0].requires_grad_()
    (norm(x) * torch.arange(5.0)).sum().backward()
    expected = norm.affine()[0] * torch.arange(5.0)
    torch.testing.assert_close(x.grad, expected.expand(6, 5))
    assert not list(norm.parameters()) and not norm.running_cov.requires_grad


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
def test_eval_leaves_the_buffers_unchanged(kind: type[nn.Module]) -> None:
    norm = kind(5)
    train(norm, draw_batches())
    before = copy.deepcopy(norm.state_dict())
    norm.eval()(draw_batches(1, seed=3)[0] * 100)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_round_trip_gives_the_same_norm(kind: type[nn.Module], assign: bool) -> None:
    trained, x = kind(5), draw_batches(1, seed=9)[0]
    train(trained, draw_batches())
    loaded = kind(5).eval()
    loaded(x)  # so that a scale is in the cache already
    loaded.load_state_dict({name: value.clone() for name, value in trained.state_dict().items()}, assign=assign)
    assert torch.equal(loaded(x), trained.eval()(x))
    assert int(loaded.num_batches_tracked) == 12


def test_the_statistics_of_isobn_are_buffers_that_are_saved() -> None:
    assert set(IsoBN(4).state_dict()) == {"running_cov", "running_std", "num_batches_tracked"}
    assert set(BatchNorm(4).state_dict()) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
def test_a_deepcopy_goes_its_own_way(kind: type[nn.Module]) -> None:
    norm, x = kind(5), draw_batches(1, seed=9)[0]
    train(norm, draw_batches())
    before = norm.eval()(x)
    other = copy.deepcopy(norm)
    assert torch.equal(other(x), before)
    train(other, draw_batches(3, seed=4))
    assert torch.equal(norm.eval()(x), before)
    assert not torch.equal(other.eval()(x), before)
    # As many changes as the original had, so that a cache that counts changes would take one for the other.
    twin = copy.deepcopy(norm)
    train(twin, draw_batches(12, seed=5))
    assert not torch.equal(twin.eval()(x), before)


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_output_has_the_dtype_of_the_input_and_statistics_stay_float32(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    norm = kind(5).to(dtype)
    outputs = train(norm, [batch.to(dtype) for batch in draw_batches()])
    assert outputs[-1].dtype == dtype and outputs[-1].isfinite().all()
    floats = [value for value in norm.state_dict().values() if value.is_floating_point()]
    assert floats and all(value.dtype == torch.float32 for value in floats)


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_casting_a_trained_norm_keeps_its_statistics_to_the_last_bit(cast: Any) -> None:
    norm = IsoBN(5)
    train(norm, draw_batches())
    before = copy.deepcopy(norm.state_dict())
    cast(norm)
    assert all(value.dtype == before[name].dtype for name, value in norm.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_statistics_under_autocast_equal_those_of_float32() -> None:
    batches = draw_batches(20, batch=64, width=8)
    plain, autocast = IsoBN(8), IsoBN(8)
    train(plain, batches)
    with torch.autocast("cpu", torch.bfloat16):
        train(autocast, batches)
    assert torch.equal(plain.running_cov, autocast.running_cov)


def count_scale_computations(norm: IsoBN, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    compute = norm._compute_scale

    def counting() -> Tensor:
        calls.append(1)
        return compute()

    monkeypatch.setattr(norm, "_compute_scale", counting)
    return calls


def test_the_scale_is_computed_once_per_change_of_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = IsoBN(5), draw_batches(1)[0]
    calls = count_scale_computations(norm, monkeypatch)
    train(norm, draw_batches(3))
    assert len(calls) == 3
    norm.eval()
    for _ in range(5):
        norm(x)
    norm.affine()
    with torch.inference_mode():
        norm(x)
    assert len(calls) == 3
    norm.load_state_dict(norm.state_dict())
    norm(x)
    norm(x)
    assert len(calls) == 4


def test_a_scale_computed_in_inference_mode_serves_training() -> None:
    norm = IsoBN(5)
    train(norm, draw_batches())
    norm.load_state_dict(norm.state_dict())
    with torch.inference_mode():
        norm.eval()(draw_batches(1)[0])
    x = draw_batches(1)[0].requires_grad_()
    norm(x).sum().backward()
    torch.testing.assert_close(x.grad, norm.affine()[0].expand(6, 5))


def test_what_affine_returns_can_be_changed_without_harm() -> None:
    norm = IsoBN(5)
    train(norm, draw_batches())
    expected = norm.affine()[0].clone()
    norm.affine()[0].zero_()
    assert torch.equal(norm.affine()[0], expected)


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_dead_dimension_is_left_as_it_is_and_hurts_no_other(bias_correction: bool) -> None:
    batches = draw_batches(20)
    with_dead = [torch.cat([batch, torch.full((6, 1), 0.25)], dim=1) for batch in batches]
    norm = IsoBN(6, bias_correction=bias_correction)
    output = train(norm, with_dead)[-1]
    assert output.isfinite().all()
    assert torch.equal(output[:, 5], torch.full((6,), 0.25))
    _, _, scale = compute_isobn([batch.tolist() for batch in with_dead], bias_correction=bias_correction)
    np.testing.assert_allclose(norm.affine()[0].numpy(), scale, rtol=1e-5)


def test_all_dimensions_dead_is_the_identity() -> None:
    norm = IsoBN(3)
    x = torch.tensor([[0.1, -0.2, 0.3]]).expand(4, 3)
    assert torch.equal(train(norm, [x])[0], x)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_batch_that_is_not_finite_leaves_statistics_and_counter_and_is_counted(kind: type[Any], bad: float) -> None:
    norm = kind(5)
    train(norm, draw_batches())
    before = copy.deepcopy(norm.state_dict())
    batch = draw_batches(1)[0]
    batch[2, 3] = bad
    train(norm, [batch, batch])
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    assert int(norm.num_batches_skipped) == 2
    assert train(norm, draw_batches(1))[0].isfinite().all()


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
def test_a_batch_of_one_uses_the_running_values_and_does_not_change_them(kind: type[Any]) -> None:
    norm = kind(5)
    train(norm, draw_batches())
    before = copy.deepcopy(norm.state_dict())
    row = draw_batches(1, seed=2)[0][:1]
    in_training = train(norm, [row])[0]
    assert torch.equal(in_training, norm.eval()(row))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    assert int(norm.num_batches_skipped) == 0


def test_saturated_dimensions_keep_their_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 0.999 + 1e-4 * torch.randn(4096, 3, generator=generator)
    norm = IsoBN(3, momentum=1.0)
    train(norm, [x])
    torch.testing.assert_close(norm.running_std.double(), x.double().std(dim=0, correction=0), rtol=1e-3, atol=0)


def test_batchnorm_equals_torch() -> None:
    ours, theirs = BatchNorm(5), nn.BatchNorm1d(5)
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(0.5, 1.5, 5))
            norm.bias.copy_(torch.linspace(-1, 1, 5))
    for batch in draw_batches():
        x, y = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        weights = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
        outputs = ours(x), theirs(y)
        for output in outputs:
            (output * weights).sum().backward()
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-4)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    ours.eval(), theirs.eval()
    x = draw_batches(1, seed=8)[0]
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(NORMS))
def test_affine_is_what_every_norm_does_in_eval_mode(name: str) -> None:
    norm = create_norm(name, 5)
    train(norm, draw_batches())
    if name == "batchnorm":
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 1.5, 5))
            norm.bias.copy_(torch.linspace(-1, 1, 5))
    x = draw_batches(1, seed=6)[0]
    weight, shift = norm.affine()
    torch.testing.assert_close(norm.eval()(x), x * weight + shift, rtol=1e-5, atol=1e-6)
    assert not weight.requires_grad and not shift.requires_grad


def test_no_norm_returns_its_input() -> None:
    x = torch.randn(3, 4)
    assert Identity(4)(x) is x


def test_an_unknown_norm_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"iso-bn.*Known: none, batchnorm, isobn.*Did you mean 'isobn'"):
        create_norm("iso-bn", 4)


@given(
    width=st.integers(1, 6),
    batch=st.integers(2, 5),
    steps=st.integers(1, 4),
    seed=st.integers(0, 2**16),
    size=st.floats(1e-6, 1e4),
    beta=st.floats(0, 1),
    eps=st.floats(1e-8, 1),
    momentum=st.floats(0.01, 1),
    bias_correction=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_isobn_on_any_finite_input_is_finite_and_follows_the_formula(
    width: int, batch: int, steps: int, seed: int, size: float, beta: float, eps: float, momentum: float,
    bias_correction: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(batch, width, generator=generator) * size for _ in range(steps)]
    norm = IsoBN(width, momentum=momentum, beta=beta, eps=eps, bias_correction=bias_correction)
    output = train(norm, batches)[-1]
    assert output.isfinite().all()
    if width > 1:  # numpy's covariance of one dimension has no matrix
        _, _, scale = compute_isobn([b.tolist() for b in batches], momentum, beta, eps, bias_correction)
        np.testing.assert_allclose(norm.affine()[0].numpy(), scale, rtol=2e-3)


# Two processes against one.


def run_process(rank: int, folder: str, sync: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    results = {}
    for kind in STATISTICS_NORMS:
        norm = kind(5, sync=sync)
        for step, batch in enumerate(draw_batches(3, batch=8)):
            mine = slice(0, 3) if rank == 0 else slice(3, 8)  # uneven shares
            rows = batch[mine]
            x = rows.clone().requires_grad_()
            output = norm(x)
            (output * output_weights(step)[mine]).sum().backward()
        results[kind.__name__] = {"state": norm.state_dict(), "output": output.detach(), "grad": x.grad}
        bad = rows.clone()
        if rank == 1:
            bad[0, 0] = math.nan
        norm(bad)
        results[kind.__name__]["skipped"] = int(norm.num_batches_skipped)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def output_weights(step: int) -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("synced")
    mp.spawn(run_process, (str(folder), True), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", STATISTICS_NORMS)
def test_two_synced_processes_equal_one_with_all_rows(kind: type[Any], synced: list[dict[str, Any]]) -> None:
    alone = kind(5)
    for step, batch in enumerate(draw_batches(3, batch=8)):
        x = batch.clone().requires_grad_()
        output = alone(x)
        (output * output_weights(step)).sum().backward()
    both = [result[kind.__name__] for result in synced]
    for name, value in alone.state_dict().items():
        assert torch.equal(both[0]["state"][name], both[1]["state"][name])
        torch.testing.assert_close(both[0]["state"][name], value, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(torch.cat([one["output"] for one in both]), output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([one["grad"] for one in both]), x.grad, rtol=1e-4, atol=1e-5)
    assert [one["skipped"] for one in both] == [1, 1], "a bad row in one process is a bad batch in all"


# Loading through transformers, whose models are built without memory of their own.

META_LOADING = """
import sys
from pathlib import Path
import torch
from isobn_finetune.loading import create_model, load_model
from isobn_finetune.tasks import get_task
for name in ("isobn", "batchnorm"):
    model = create_model(Path(sys.argv[1]), get_task("rte"), {"name": name})
    norm = model.norm
    for part, value in (*norm.named_buffers(), *norm.named_parameters()):
        print(name, "created", part, value.double().sum().item())
    for _ in range(3):
        model.train()(torch.randint(5, 50, (4, 7)))
    folder = Path(sys.argv[2]) / name
    model.save_pretrained(folder)
    model.config.name_or_path = ""
    loaded = type(model).from_pretrained(folder)
    for part, value in loaded.norm.named_buffers():
        assert torch.equal(value, dict(norm.named_buffers())[part]), (part, value)
    x = torch.randint(5, 50, (4, 7))
    assert torch.equal(loaded.eval()(x).logits, model.eval()(x).logits)
"""


def test_no_stale_memory_gets_into_statistics(bert_dir: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", META_LOADING, str(bert_dir), str(tmp_path)],
        env={**os.environ, "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sums = {line.split()[0] + "." + line.split()[2]: float(line.split()[3]) for line in done.stdout.splitlines()}
    assert sums.pop("batchnorm.running_var") == sums.pop("batchnorm.weight") == 16
    assert len(sums) == 8 and set(sums.values()) == {0.0}
