"""Finds the user's line behind a call: the innermost frame outside torch, the standard library and
site-packages.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import hangwatch

from .writer import RingWriter

_MAX_CACHED = 4096  # code objects; past that all caches are cleared

# Where the code of a frame comes from, as `CodeOrigin` in native/call_sites.h. Machinery is torch,
# the standard library and this package.
_USER, _LIBRARY, _MACHINERY = 0, 1, 2


class CallSites:
    """Finds and interns call sites. Each code object is classified once; after that, a frame costs
    one dictionary look-up.
    """

    def __init__(
        self, ring: RingWriter, on_origin: Callable[[int, int | None], None] | None = None
    ) -> None:
        """``on_origin(id(code), origin)`` is called for each code object that is classified; an
        origin of None revokes all earlier ones.
        """
        self._ring = ring
        self._on_origin = on_origin
        # By id(code). Keeping the code object alive keeps its id unique.
        self._origins: dict[int, tuple[int, CodeType]] = {}
        self._site_numbers: dict[tuple[int, int], int] = {}
        self._user_site_numbers: dict[tuple[int, int], int] = {}
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        self._machinery_prefixes = (
            *((f"{Path(torch).parent}/",) if torch else ()),
            f"{Path(__file__).resolve().parent}/",
            str(hangwatch.__file__),
            "<frozen ", "<eval_with_key>", "<torch_package",
        )  # fmt: skip
        paths = sysconfig.get_paths()
        self._stdlib_prefixes = tuple(f"{paths[name]}/" for name in ("stdlib", "platstdlib"))
        self._library_parts = tuple(f"/{name}/" for name in ("site-packages", "dist-packages"))

    def get_cached_site(self, frame: FrameType) -> int:
        """The site's number if the frame itself is the user's and its site is interned, else 0.
        Faster than `find_site`.
        """
        number = self._user_site_numbers.get((id(frame.f_code), frame.f_lasti), 0)
        return number if number and self._ring.is_site_fresh(number) else 0

    def find_site(self, frame: FrameType | None) -> int:
        """The site's number in the ring; 0 if the stack has neither user nor library frames."""
        origins = self._origins
        library: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            cached = origins.get(id(code))
            origin = cached[0] if cached is not None else self._classify_code(code)
            if origin == _USER:
                number = self._intern_site(frame)
                self._user_site_numbers[(id(code), frame.f_lasti)] = number
                return number
            if origin == _LIBRARY and library is None:
                library = frame
            frame = frame.f_back
        return self._intern_site(library) if library is not None else 0

    def is_user_code(self, code: CodeType) -> bool:
        cached = self._origins.get(id(code))
        return (cached[0] if cached is not None else self._classify_code(code)) == _USER

    def _intern_site(self, frame: FrameType) -> int:
        key = (id(frame.f_code), frame.f_lasti)
        number = self._site_numbers.get(key, 0)
        if number and self._ring.is_site_fresh(number):
            return number
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        number = self._ring.intern_site(
            {"file": code.co_filename[-240:], "line": frame.f_lineno, "function": name[-80:]}
        )
        self._site_numbers[key] = number
        return number

    def _classify_code(self, code: CodeType) -> int:
        if len(self._origins) >= _MAX_CACHED:
            self._origins.clear()
            self._site_numbers.clear()
            self._user_site_numbers.clear()
            if self._on_origin is not None:
                self._on_origin(0, None)
        origin = self._classify_file(code.co_filename)
        self._origins[id(code)] = (origin, code)
        if self._on_origin is not None:
            self._on_origin(id(code), origin)
        return origin

    def _classify_file(self, file: str) -> int:
        if file.startswith(self._machinery_prefixes) or "torchinductor_" in file:
            return _MACHINERY
        if any(part in file for part in self._library_parts):
            return _LIBRARY
        return _MACHINERY if file.startswith(self._stdlib_prefixes) else _USER
