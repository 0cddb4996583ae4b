"""Fine-tune BERT-family encoders with isotropic batch normalization, and ship a plain checkpoint.

Public names are loaded when they are first used, so that importing the package is instant. Once transformers loads its
auto classes, with the package imported before or after, they know our models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from isobn_finetune.auto_register import register_when_loaded
from isobn_finetune.version import __version__

if TYPE_CHECKING:
    from isobn_finetune.config import RunConfig
    from isobn_finetune.isotropy import explained_variance
    from isobn_finetune.loading import load_model
    from isobn_finetune.norms import IsoBN
    from isobn_finetune.results import RunResult
    from isobn_finetune.training import fine_tune

_HOMES = {
    "IsoBN": "norms",
    "RunConfig": "config",
    "RunResult": "results",
    "explained_variance": "isotropy",
    "fine_tune": "training",
    "load_model": "loading",
}

__all__ = ["IsoBN", "RunConfig", "RunResult", "__version__", "explained_variance", "fine_tune", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_loaded()
