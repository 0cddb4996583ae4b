"""What number format a run computes in."""

from __future__ import annotations

import torch

from isobn_finetune.errors import ConfigError


def resolve_precision(precision: str) -> str:
    """Turns ``auto`` into what the hardware has.

    Args:
        precision: ``auto``, ``fp32``, ``bf16`` or ``fp16``.

    Returns:
        ``auto`` becomes bf16 where the hardware computes in it, else fp16 on a GPU, else fp32.

    Raises:
        ConfigError: fp16 without a GPU.
    """
    has_gpu = torch.cuda.is_available()
    if precision == "fp16" and not has_gpu:
        raise ConfigError(
            "precision: fp16 needs a CUDA GPU and none was found (its loss scaling is of no use on a CPU). "
            "Use --precision auto, bf16 or fp32"
        )
    if precision != "auto":
        return precision
    if has_gpu:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if torch.backends.mps.is_available():
        return "fp32"
    return "bf16" if _cpu_has_bf16() else "fp32"


def _cpu_has_bf16() -> bool:
    """True where matrix products in bf16 have instructions of their own."""
    # Older releases of torch cannot say; fp32 is right on every CPU.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
