"""Makes transformers' auto classes know our models, without importing transformers before anybody needs it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_AUTO_MODULE = "transformers.models.auto.modeling_auto"


def register_when_loaded() -> None:
    """Registers now if transformers' auto classes are loaded, else as soon as they are."""
    if _AUTO_MODULE in sys.modules:
        _register()
    elif not any(isinstance(finder, _AutoModuleFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoModuleFinder())


def _register() -> None:
    # It registers at its end. Where it is being imported already, and so called us, that end is still to come.
    importlib.import_module("isobn_finetune.modeling")


class _AutoModuleFinder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find transformers' auto module, and registers once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _AUTO_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
