"""Attention over sequences that lie one after another in a single row, without work on padding tokens.

Registered with transformers as the attention implementation ``isobn_packed``. On a CPU the sequences of a batch are
split into groups of like length, each of which is one set of batched matrix products; on a GPU torch's
variable-length kernel runs over the row as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from isobn_finetune.cpu_dropout import DropoutRate, draw_noise, drop, get_rate

PACKED_ATTENTION = "isobn_packed"

# What starting one more group costs, in scores of one head: found by timing a 12-head encoder on two cores.
_GROUP_COST = 3000
# Groups are as wide as whole vector registers: a softmax over 12 numbers takes eight times as long as one over 16.
_WIDTH_STEP = 8


@dataclass(frozen=True)
class Group:
    """Sequences that share one set of batched matrix products.

    Attributes:
        members: Their places in the batch.
        width: Length of the longest, rounded up; shorter ones are filled up to it.
        rows: Slice of the grouped buffers, ``members * heads * width`` rows of one head each.
    """

    members: tuple[int, ...]
    width: int
    rows: slice


def split_by_length(lengths: list[int], group_cost: int = _GROUP_COST) -> list[list[int]]:
    """Splits sequences into groups of like length so that scores computed and groups started cost least together.

    Args:
        lengths: Tokens in each sequence.
        group_cost: What one more group costs, in scores.

    Returns:
        Places in ``lengths``, group by group, the longest first. In order of length the best groups are contiguous,
        so dynamic programming over the sorted lengths finds them.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    best = [0.0] + [float("inf")] * len(order)
    start_of = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        for start in range(end - 1, -1, -1):
            cost = best[start] + group_cost + (end - start) * lengths[order[start]] ** 2
            if cost < best[end]:
                best[end], start_of[end] = cost, start
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[start_of[end] : end])
        end = start_of[end]
    return groups[::-1]


class PackedSequences:
    """Where the sequences of a packed row begin and end, and how attention groups them.

    Made once for a batch and passed to the encoder as the keyword argument ``packed``, from where transformers hands
    it on to every layer's attention.

    Args:
        cu_seqlens: Offsets ``(sequences + 1,)`` of the sequences in the row; the last is the number of tokens.
        max_length: Tokens in the longest sequence.
    """

    def __init__(self, cu_seqlens: Tensor, max_length: int) -> None:
        self.cu_seqlens = cu_seqlens.to(torch.int32)
        self.max_length = max_length
        self._plans: dict[int, GroupPlan] = {}

    def first(self, states: Tensor) -> Tensor:
        """Token 0 of each sequence: ``(tokens, width)`` to ``(sequences, width)``."""
        return states.index_select(0, self.cu_seqlens[:-1])

    def mean(self, states: Tensor) -> Tensor:
        """The mean over each sequence's tokens: ``(tokens, width)`` to ``(sequences, width)``."""
        lengths = self.cu_seqlens.diff()
        sequence = torch.arange(len(lengths), device=states.device).repeat_interleave(lengths, output_size=len(states))
        sums = states.new_zeros(len(lengths), states.shape[-1], dtype=torch.promote_types(states.dtype, torch.float32))
        return sums.index_add(0, sequence, states.to(sums.dtype)) / lengths.unsqueeze(1)

    def plan(self, heads: int) -> GroupPlan:
        """The grouping for attention with that many heads, computed at the first layer that asks."""
        if heads not in self._plans:
            self._plans[heads] = GroupPlan(self.cu_seqlens.tolist(), heads, self.cu_seqlens.device)
        return self._plans[heads]


class GroupPlan:
    """Index tensors that carry the rows of a packed batch into groups and back.

    Args:
        offsets: Offsets of the sequences in the row.
        heads: Number of attention heads.
        device: Where the indices are needed.
    """

    def __init__(self, offsets: list[int], heads: int, device: torch.device) -> None:
        self.heads = heads
        self.lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
        self.groups: list[Group] = []
        gather, fill, rows = [], [], 0
        head = np.arange(heads)[None, :, None]
        for members in split_by_length(self.lengths):
            width = -(-self.lengths[members[0]] // _WIDTH_STEP) * _WIDTH_STEP
            position = np.arange(width)[None, :]
            length = np.array([self.lengths[member] for member in members])[:, None]
            start = np.array([offsets[member] for member in members])[:, None]
            is_filling = position >= length
            token = np.where(is_filling, start, start + position)  # any real row does to fill up
            gather.append((token[:, None, :] * heads + head).ravel())
            fill.append(np.broadcast_to(is_filling[:, None, :], (len(members), heads, width)).ravel())
            row_count = len(members) * heads * width
            self.groups.append(Group(tuple(members), width, slice(rows, rows + row_count)))
            rows += row_count
        gathered, filling = np.concatenate(gather), np.concatenate(fill)
        back = np.empty(offsets[-1] * heads, dtype=np.int64)
        (real,) = np.nonzero(~filling)
        back[gathered[real]] = real
        self.gather = torch.from_numpy(gathered).to(device)
        self.back = torch.from_numpy(back).to(device)
        self.filling = torch.from_numpy(np.nonzero(filling)[0]).to(device)
        self._biases: dict[tuple[int | None, torch.dtype], list[Tensor | None]] = {}

    def biases(self, window: int | None, like: Tensor) -> list[Tensor | None]:
        """What each group adds to its scores: minus infinity on filled-up keys and outside the window.

        Args:
            window: Farthest distance a token may attend to, or None for full attention.
            like: A tensor of the wanted dtype and device.

        Returns:
            For each group ``(members, 1, 1 or width, width)``, or None where there is nothing to hide.
        """
        key = (window, like.dtype)
        if key not in self._biases:
            self._biases[key] = [self._bias(group, window, like) for group in self.groups]
        return self._biases[key]

    def _bias(self, group: Group, window: int | None, like: Tensor) -> Tensor | None:
        position = torch.arange(group.width)
        length = torch.tensor([self.lengths[member] for member in group.members])
        hidden = (position >= length[:, None])[:, None, None, :]
        if window is not None and group.width > window + 1:
            # A row that is itself only filling may see nothing but filling; softmax would give NaN there, so its own
            # place stays open. Nothing of such a row is ever used.
            distance = _distances(group.width, position.device)
            hidden = (hidden | (distance > window)) & (distance > 0)
        elif not hidden.any():
            return None
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(like)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed: PackedSequences | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over packed sequences or, without ``packed``, over a padded batch.

    Args:
        module: The attention layer.
        query: ``(1, heads, tokens, head_dim)``; ``key`` and ``value`` likewise.
        key: See ``query``.
        value: See ``query``.
        attention_mask: Of a padded batch.
        dropout: Probability of dropping an attention weight.
        scaling: Factor on the scores; by default one over the root of ``head_dim``.
        packed: Where the sequences begin and end.
        sliding_window: As transformers gives it, one more than the farthest distance a token may attend to.
        **kwargs: For the attention of a padded batch.

    Returns:
        ``(1, tokens, heads, head_dim)``, and no attention weights.
    """
    if packed is None:
        if attention_mask is None and sliding_window is not None:
            attention_mask = _distances(query.shape[2], query.device) < sliding_window
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    heads, head_dim = query.shape[1], query.shape[3]
    scaling = head_dim**-0.5 if scaling is None else scaling
    window = None if sliding_window is None or sliding_window > packed.max_length else sliding_window - 1
    # (tokens, heads, head_dim): how the projections wrote them, so nothing is copied here.
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if query.is_cuda:
        output = _attend_on_gpu(query, key, value, packed, scaling, window, dropout)
        if output is not None:
            return output.unsqueeze(0), None
    plan = packed.plan(heads)
    rate = get_rate(dropout) if dropout > 0.0 else None
    query, key, value = (states.reshape(-1, head_dim) for states in (query, key, value))
    biases = plan.biases(window, query)
    if torch.is_grad_enabled() or rate is not None:
        output = _GroupedAttention.apply(query, key, value, plan, biases, scaling, rate)
    else:
        output = _attend_without_gradient(query, key, value, plan, biases, scaling)
    return output.view(1, -1, heads, head_dim), None


def _get_varlen_attention(query: Tensor) -> Callable[..., Any] | None:
    """Torch's variable-length attention, where it is there and can compute on such tensors."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if not half or not query.is_cuda or torch.cuda.get_device_capability(query.device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn


def _attend_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scaling: float,
    window: int | None,
    dropout: float,
) -> Tensor | None:
    """One kernel over the whole row, ``(tokens, heads, head_dim)``; None where no kernel can do what is asked."""
    offsets, longest = packed.cu_seqlens, packed.max_length
    varlen_attn = _get_varlen_attention(query)
    if varlen_attn is not None and dropout == 0.0:
        side = -1 if window is None else window
        return varlen_attn(
            query, key, value, offsets, offsets, longest, longest, scale=scaling, window_size=(side, side)
        )
    if window is not None:
        return None
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(states.contiguous(), offsets, max_seqlen=longest).transpose(1, 2)
        for states in (query, key, value)
    )
    output = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2).values()


def _distances(length: int, device: torch.device) -> Tensor:
    """How far each place is from each other, ``(length, length)``."""
    position = torch.arange(length, device=device)
    return (position[:, None] - position[None, :]).abs()


def _no_mask_where_packed(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of a padded batch; none for a packed row, which comes without an attention mask."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask_where_packed)


class _GroupedAttention(torch.autograd.Function):
    """softmax(q k^T * scaling + bias), dropout, times v; rows are ``(tokens * heads, head_dim)``.

    Everything is done group by group, so that a group's scores are still in the cache when they are next needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: GroupPlan,
        biases: list[Tensor | None],
        scaling: float,
        rate: DropoutRate | None,
    ) -> Tensor:
        query, key, value = (rows.index_select(0, plan.gather) for rows in (query, key, value))
        output = torch.empty_like(value)
        weights, noises = [], []
        for group, bias in zip(plan.groups, biases, strict=True):
            scores = query.new_empty(group.rows.stop - group.rows.start, group.width).view(-1, group.width, group.width)
            if bias is not None:
                scores.view(-1, plan.heads, group.width, group.width).copy_(bias)
            keys = _wide(key, group).mT
            torch.baddbmm(scores, _wide(query, group), keys, beta=bias is not None, alpha=scaling, out=scores)
            weight = torch.softmax(scores.to(_exact(scores)), dim=-1).to(scores.dtype)
            noise = None if rate is None else draw_noise(weight.shape, weight.device)
            kept = weight if noise is None or rate is None else drop(weight, noise, rate)
            torch.bmm(kept, _wide(value, group), out=_wide(output, group))
            weights.append(weight)
            noises.append(noise)
        if rate is not None:
            output.mul_(rate.keep_scale)
        ctx.save_for_backward(query, key, value, output, *weights, *noises)
        ctx.plan, ctx.scaling, ctx.rate = plan, scaling, rate
        return output.index_select(0, plan.back)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan, scaling, rate = ctx.plan, ctx.scaling, ctx.rate
        query, key, value, output, *saved = ctx.saved_tensors
        weights, noises = saved[: len(plan.groups)], saved[len(plan.groups) :]
        grad_output = grad_output.index_select(0, plan.gather)
        if len(plan.filling):
            grad_output.index_fill_(0, plan.filling, 0.0)  # then filled-up queries reach neither keys nor values
        keep_scale = 1.0 if rate is None else rate.keep_scale
        grad_query, grad_key, grad_value = (torch.empty_like(rows) for rows in (query, key, value))
        for group, weight, noise in zip(plan.groups, weights, noises, strict=True):
            grad_group = _wide(grad_output, group)
            # The gradient of softmax is P * (dP - rowsum(P * dP)); the row sum is also that of output * grad_output.
            exact_type = _exact(grad_group)
            row_sums = (_wide(output, group).to(exact_type) * grad_group.to(exact_type)).sum(-1, keepdim=True)
            grad_group.mul_(keep_scale)
            kept = weight if rate is None else drop(weight, noise, rate)
            torch.bmm(kept.mT, grad_group, out=_wide(grad_value, group))
            grad = torch.bmm(grad_group, _wide(value, group).mT)
            if rate is not None:
                grad = drop(grad, noise, rate)
            grad = grad.to(exact_type).sub_(row_sums).mul_(weight.to(exact_type)).to(weight.dtype)
            for left, right, out in ((grad, key, grad_query), (grad.mT, query, grad_key)):
                out = _wide(out, group)
                torch.baddbmm(out, left, _wide(right, group), beta=0.0, alpha=scaling, out=out)
        grads = (rows.index_select(0, plan.back) for rows in (grad_query, grad_key, grad_value))
        return (*grads, None, None, None, None)


def _attend_without_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: GroupPlan,
    biases: list[Tensor | None],
    scaling: float,
) -> Tensor:
    """The same without dropout, on torch's fused kernel: it never holds a group's scores in memory."""
    query, key, value = (rows.index_select(0, plan.gather) for rows in (query, key, value))
    output = torch.empty_like(value)
    for group, bias in zip(plan.groups, biases, strict=True):
        q, k, v = (_wide(rows, group).unflatten(0, (-1, plan.heads)) for rows in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
        _wide(output, group).copy_(attended.flatten(0, 1))
    return output.index_select(0, plan.back)


def _wide(rows: Tensor, group: Group) -> Tensor:
    """A group's share of grouped rows, ``(members * heads, width, head_dim)``."""
    return rows[group.rows].view(-1, group.width, rows.shape[-1])


def _exact(scores: Tensor) -> torch.dtype:
    """float32 for scores of less precision: better numbers, and in bfloat16 odd widths are several times slower."""
    return torch.promote_types(scores.dtype, torch.float32)
