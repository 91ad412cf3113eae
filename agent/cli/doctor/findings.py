"""The result of a check of ``hangwatch doctor``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``ok`` is None for a warning. A finding is ``unreachable`` if no server answers."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""
    unreachable: bool = False

    @property
    def verdict(self) -> str:
        return {True: "ok", None: "warn", False: "fail"}[self.ok]

    def to_document(self) -> dict[str, object]:
        """The finding in the output of ``--json``."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "ok": self.ok,
            "detail": self.detail,
            "remedy": self.remedy,
        }
