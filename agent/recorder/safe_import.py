"""Builtin names for a module whose functions run while torch makes Python objects of a call's
arguments and results.

For each process group, work and reduce op, torch's C++ imports the same module again (`get_python_cu`
in torch/csrc/jit/python/pybind_utils.h). It uses the `__import__` in the globals of the running
function (`PyImport_Import`). That takes 0.2 microseconds longer than a comparison, on every call of
every rank.
"""

from __future__ import annotations

import builtins
import sys
from types import ModuleType
from typing import Any


def _import_known_module(
    name: str, *rest: Any, modules: dict[str, ModuleType] = sys.modules
) -> ModuleType:
    return modules[name] if name == "torch.jit._state" else __import__(name, *rest)


PATCHED_BUILTINS: dict[str, Any] = vars(builtins) | {"__import__": _import_known_module}
