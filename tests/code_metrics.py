"""``python -m tests.code_metrics [PACKAGE ...]``: how the code reads, in numbers, beside other projects.

For each part of the product, and for each installed package that is named (``uvicorn`` and ``pystack`` by default):
modules, their lines (median, 95th percentile, longest), the share of functions with a one-word
name, AST nodes per line of code, and the share of functions with a docstring.
"""

from __future__ import annotations

import ast
import importlib.util
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("hangwatch", "agent", "server")


@dataclass(kw_only=True)
class CodeMetrics:
    """The figures of one tree of modules. Dunder methods do not count as functions."""

    lines: list[int] = field(default_factory=list)  # of each module
    code_lines: int = 0  # neither blank nor comment only
    nodes: int = 0
    functions: int = 0
    one_word: int = 0
    documented: int = 0

    def add_module(self, source: str) -> None:
        lines = source.splitlines()
        self.lines.append(len(lines))
        self.code_lines += sum(bool(s) and not s.startswith("#") for s in map(str.strip, lines))
        for node in ast.walk(ast.parse(source)):
            self.nodes += 1
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node.name.startswith("__"):
                continue
            self.functions += 1
            self.one_word += "_" not in node.name.strip("_")
            self.documented += ast.get_docstring(node) is not None

    def format_row(self, name: str) -> str:
        ordered = sorted(self.lines)
        p95 = ordered[max(0, round(0.95 * len(ordered)) - 1)]
        functions = max(1, self.functions)
        return (
            f"{name:<12}{len(ordered):>8}{statistics.median(ordered):>8.0f}{p95:>6}{ordered[-1]:>6}"
            f"{self.functions:>11}{self.one_word / functions:>10.0%}"
            f"{self.nodes / max(1, self.code_lines):>12.1f}{self.documented / functions:>12.0%}"
        )


def measure_tree(*folders: Path) -> CodeMetrics:
    """The metrics of all modules below ``folders``, empty ones left out."""
    metrics = CodeMetrics()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if source := path.read_text(encoding="utf-8").strip():
                metrics.add_module(source)
    return metrics


def main() -> int:
    print(
        f"{'':<12}{'modules':>8}{'median':>8}{'p95':>6}{'max':>6}{'functions':>11}{'one word':>10}"
        f"{'nodes/line':>12}{'docstring':>12}"
    )
    for part in PARTS:
        print(measure_tree(ROOT / part).format_row(part))
    print(measure_tree(*(ROOT / part for part in PARTS)).format_row("all three"))
    for name in sys.argv[1:] or ["uvicorn", "pystack"]:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            print(f"{name} is not installed: pip install {name}", file=sys.stderr)
            return 1
        print(measure_tree(Path(spec.origin).parent).format_row(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
