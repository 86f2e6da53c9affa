"""Import hook: changing a module when, and only in processes where, it is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

logger = logging.getLogger("vllm.backhaul_connector")  # below "vllm", whose handlers show it in an engine's log

Change = Callable[[ModuleType], object]


def change_on_import(module: str, change: Change) -> None:
    """Calls `change` with the module: now, if it is imported already, else right after its import.

    An error in `change` is logged and goes no further. A second call for the same module takes the place of the first.
    """
    if module in sys.modules:
        _apply(change, sys.modules[module])
        return
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.changes[module] = change


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self.changes.get(fullname)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _apply(change, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _apply(change: Change, module: ModuleType) -> None:
    try:
        change(module)
    except Exception:
        logger.exception("Backhaul could not change %s: it is left as it is", module.__name__)
