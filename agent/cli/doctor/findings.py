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


def report_success(name: str, detail: str) -> Finding:
    return Finding(name=name, ok=True, detail=detail)


def report_warning(name: str, detail: str, remedy: str = "") -> Finding:
    return Finding(name=name, ok=None, detail=detail, remedy=remedy)


def report_failure(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, ok=False, detail=detail, remedy=remedy)
