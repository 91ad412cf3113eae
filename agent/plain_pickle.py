"""Pickles of plain data only: dicts, lists, tuples, strings, numbers. Anything that would import or call something is refused."""

from __future__ import annotations

import io
import pickle
from typing import Any


class NotPlainError(Exception):
    """The bytes are no pickle of plain data. Nothing of them was run."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Every way of a pickle to code leads through here."""
        raise NotPlainError(f"it wants to import {module}.{name}, as no dump does: it was not run. Do not trust where it comes from")

    def persistent_load(self, pid: Any) -> Any:
        raise NotPlainError(f"it refers to an object outside of it ({pid!r}), as no dump does")


def loads(data: bytes) -> object:
    """Raises NotPlainError for whatever is not plain data, or no pickle."""
    try:
        return _Plain(io.BytesIO(data)).load()
    except NotPlainError:
        raise
    except Exception as error:  # the ways in which bytes can fail to be a pickle are many; MemoryError is one
        raise NotPlainError(f"it cannot be read as a pickle: {type(error).__name__}: {error}") from error
