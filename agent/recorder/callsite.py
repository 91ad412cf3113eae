"""Which line of the user's code is behind a call: the innermost frame outside torch, the standard
library and site-packages.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import hangwatch

from .writer import RingWriter

_KEEP = 4096  # code objects and places; past that both caches start anew

_USER, _LIBRARY, _MACHINERY = 0, 1, 2


class CallSites:
    """Finds and interns call sites. Code objects are judged once each; a known place costs a
    dictionary look-up a frame.
    """

    def __init__(
        self, ring: RingWriter, tell: Callable[[int, int | None], None] | None = None
    ) -> None:
        """``tell(id(code), verdict)`` is called for each code object that is judged; None takes
        back all verdicts.
        """
        self._ring = ring
        self._tell = tell
        self._judged: dict[
            int, tuple[int, CodeType]
        ] = {}  # by id(code), which the kept code object keeps unique
        self._known: dict[tuple[int, int], int] = {}
        self._users: dict[tuple[int, int], int] = {}
        torch = getattr(sys.modules.get("torch"), "__file__", None)
        self._machinery = (
            *((f"{Path(torch).parent}/",) if torch else ()),
            f"{Path(__file__).resolve().parent}/",
            str(hangwatch.__file__),
            "<frozen ", "<eval_with_key>", "<torch_package",
        )  # fmt: skip
        paths = sysconfig.get_paths()
        self._stdlib = tuple(f"{paths[name]}/" for name in ("stdlib", "platstdlib"))
        self._libraries = tuple(f"/{name}/" for name in ("site-packages", "dist-packages"))

    def known(self, frame: FrameType) -> int:
        """The site's number if this very frame is the user's and was met before, else 0: a short
        cut before `find`.
        """
        number = self._users.get((id(frame.f_code), frame.f_lasti), 0)
        return number if number and self._ring.site_fresh(number) else 0

    def find(self, frame: FrameType | None) -> int:
        """The site's number in the ring; 0 where no Python frame of anybody's is on the stack."""
        judged = self._judged
        library: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            known = judged.get(id(code))
            verdict = known[0] if known is not None else self._judge(code)
            if verdict == _USER:
                number = self._users[(id(code), frame.f_lasti)] = self._number(frame)
                return number
            if verdict == _LIBRARY and library is None:
                library = frame
            frame = frame.f_back
        return self._number(library) if library is not None else 0

    def is_user(self, code: CodeType) -> bool:
        known = self._judged.get(id(code))
        return (known[0] if known is not None else self._judge(code)) == _USER

    def _number(self, frame: FrameType) -> int:
        key = (id(frame.f_code), frame.f_lasti)
        number = self._known.get(key, 0)
        if number and self._ring.site_fresh(number):
            return number
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
        number = self._ring.site(
            {"file": code.co_filename[-240:], "line": frame.f_lineno, "function": name[-80:]}
        )
        self._known[key] = number
        return number

    def _judge(self, code: CodeType) -> int:
        if len(self._judged) >= _KEEP:
            self._judged.clear()
            self._known.clear()
            self._users.clear()
            if self._tell is not None:
                self._tell(0, None)
        verdict = self._judge_file(code.co_filename)
        self._judged[id(code)] = (verdict, code)
        if self._tell is not None:
            self._tell(id(code), verdict)
        return verdict

    def _judge_file(self, file: str) -> int:
        if file.startswith(self._machinery) or "torchinductor_" in file:
            return _MACHINERY
        if any(part in file for part in self._libraries):
            return _LIBRARY
        return _MACHINERY if file.startswith(self._stdlib) else _USER
