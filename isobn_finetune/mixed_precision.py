"""Linear layers that compute in bfloat16 on a CPU without casting their weights more than once a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

# A fused optimizer changes weights without counting up their version, so its steps are counted as well.
_optimizer_steps = 0


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


class _Bf16LinearFunction(torch.autograd.Function):
    """y = x W^T + b in bfloat16; the gradients of W and b come out in their own dtype, cast once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, half: Tensor, half_bias: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        ctx.save_for_backward(rows, half)
        ctx.shape, ctx.dtype, ctx.weight_dtype, ctx.has_bias = x.shape, x.dtype, weight.dtype, bias is not None
        output = rows @ half.t() if bias is None else torch.addmm(half_bias, rows, half.t())
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, half = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = (grad @ half).view(ctx.shape).to(ctx.dtype) if needs_x else None
        grad_weight = (grad.t() @ rows).to(ctx.weight_dtype) if needs_weight else None
        grad_bias = grad.sum(0).to(ctx.weight_dtype) if needs_bias and ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None


class Bf16Linear(nn.Linear):
    """``nn.Linear`` that under bfloat16 autocast on a CPU keeps a bfloat16 copy of its weights until they change.

    Outside such a context it is the layer it replaces. Autocast itself casts anew in every forward pass, and again
    each time an input is shared between layers.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self._half: tuple[Tensor, Tensor] | None = None
        self._made_from: tuple[int, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        """Applies the layer."""
        in_bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        if input.device.type != "cpu" or not in_bf16:
            return F.linear(input, self.weight, self.bias)
        return _Bf16LinearFunction.apply(input, self.weight, self.bias, *self._half_weights())

    def _half_weights(self) -> tuple[Tensor, Tensor]:
        bias = self.weight.new_empty(0) if self.bias is None else self.bias
        made_from = (self.weight.data_ptr(), self.weight._version, bias._version, _optimizer_steps)
        if made_from != self._made_from:
            with torch.inference_mode(False), torch.no_grad():  # in this order: the first turns gradients on
                if self._half is None or self._half[0].shape != self.weight.shape:
                    self._half = self.weight.to(torch.bfloat16), bias.to(torch.bfloat16)
                else:  # in place: fresh memory for every weight at every step would cost more than the cast
                    self._half[0].copy_(self.weight)
                    self._half[1].copy_(bias)
            self._made_from = made_from
        assert self._half is not None
        return self._half


def use_bf16_linear(model: nn.Module) -> int:
    """Replaces every ``nn.Linear`` of a model by :class:`Bf16Linear` around the same parameters.

    Returns:
        How many there were.
    """
    replaced = 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                layer = Bf16Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
                layer.weight, layer.bias = child.weight, child.bias
                setattr(module, name, layer.train(child.training))
                replaced += 1
    return replaced
