"""No module of the product is so long that it tells two stories."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).parents[2]
MAX_LINES = 300


def test_no_module_is_too_long() -> None:
    lines_by_path = {
        path.relative_to(PROJECT): len(path.read_text(encoding="utf-8").splitlines())
        for package in ("hangwatch", "agent", "server")
        for path in (PROJECT / package).rglob("*.py")
    }
    assert len(lines_by_path) > 300, "the product's modules are elsewhere"
    assert {path: count for path, count in lines_by_path.items() if count > MAX_LINES} == {}
