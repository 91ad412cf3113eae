"""``python -m tests.code_metrics [PACKAGE ...]``: how the code reads, in numbers, beside other projects.

For each part of the product, and for each installed package that is named (by default uvicorn, dask.distributed and sentry-sdk, which are
models for code of this size), without their tests and generated files:

- modules, all lines, and the lines of a module (median, 95th percentile, longest);
- the share of lines that are imports, and of modules with a single importer in the same tree;
- functions, and the share of those that the tree uses once or whose name is a single word;
- AST nodes per line of code, both without docstrings;
- the share of functions with a docstring;
- the share of comments that begin with a bare preposition or pronoun, so that they have no subject;
- class names that are defined more than once.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("hangwatch", "agent", "server")
MODELS = {"uvicorn": "uvicorn", "distributed": "distributed", "sentry_sdk": "sentry-sdk"}
SKIPPED_FOLDERS = {"tests", "__pycache__", "node_modules", "_vendor"}
PREPOSITION_OR_PRONOUN = re.compile(
    "as|at|by|for|from|in|into|like|of|on|than|to|until|with|within|without"
    "|he|her|him|his|it|its|she|that|their|them|these|they|this|those|us|we|which|who|whose",
    re.IGNORECASE,
)


@dataclass(kw_only=True)
class CodeMetrics:
    """The figures of one tree of modules. Dunder methods do not count as functions."""

    name: str
    lines: list[int] = field(default_factory=list)  # one number for each module
    import_lines: int = 0
    code_lines: int = 0  # lines that are neither blank, nor only a comment, nor part of a docstring
    nodes: int = 0
    functions: list[str] = field(default_factory=list)
    documented: int = 0
    uses: Counter[str] = field(default_factory=Counter)  # names and attributes that are read
    classes: Counter[str] = field(default_factory=Counter)
    comments: int = 0
    comments_without_subject: int = 0
    importers: dict[str, set[str]] = field(default_factory=dict)

    def add_module(self, source: str, tree: ast.Module) -> None:
        lines = source.splitlines()
        self.lines.append(len(lines))
        docstrings = list(iter_docstrings(tree))
        in_docstrings = {
            number for node in docstrings for number in range(node.lineno, get_end(node) + 1)
        }
        self.code_lines += sum(
            bool(text) and not text.startswith("#") and number not in in_docstrings
            for number, text in enumerate(map(str.strip, lines), 1)
        )
        # A docstring is an expression statement and its constant.
        self.nodes += sum(1 for _ in ast.walk(tree)) - 2 * len(docstrings)
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.import_lines += get_end(node) - node.lineno + 1
            elif isinstance(node, ast.ClassDef):
                self.classes[node.name] += 1
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if not node.name.startswith("__"):
                    self.functions.append(node.name)
                    self.documented += ast.get_docstring(node) is not None
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                self.uses[node.attr] += 1
        self._count_comments(source)

    def _count_comments(self, source: str) -> None:
        """A block of comment lines counts once, by its first word."""
        last_line = -1
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type != tokenize.COMMENT:
                continue
            line, is_own_line = token.start[0], not token.line[: token.start[1]].strip()
            is_continued = is_own_line and line == last_line + 1
            last_line = line if is_own_line else -1
            words = token.string.lstrip("#!: ").replace(",", " ").split()
            if is_continued or not words or words[0] in ("noqa", "type", "fmt", "pragma"):
                continue
            self.comments += 1
            self.comments_without_subject += bool(PREPOSITION_OR_PRONOUN.fullmatch(words[0]))

    def format_cells(self) -> dict[str, str]:
        """The figures as text, by the titles of their columns."""
        lines, functions = sorted(self.lines), len(self.functions)
        single_importer = sum(len(users) == 1 for users in self.importers.values())
        used_once = sum(self.uses[name] == 1 for name in self.functions)
        one_word = sum("_" not in name.strip("_") for name in self.functions)
        return {
            "": self.name,
            "modules": str(len(lines)),
            "lines": str(sum(lines)),
            "median": f"{statistics.median(lines):.0f}",
            "p95": str(lines[max(0, round(0.95 * len(lines)) - 1)]),
            "max": str(lines[-1]),
            "imports": f"{self.import_lines / sum(lines):.1%}",
            "one importer": f"{single_importer / len(lines):.0%}",
            "functions": str(functions),
            "used once": f"{used_once / functions:.0%}",
            "one word": f"{one_word / functions:.0%}",
            "nodes/line": f"{self.nodes / self.code_lines:.1f}",
            "docstring": f"{self.documented / functions:.0%}",
            "no subject": f"{self.comments_without_subject / max(1, self.comments):.0%}",
            "same class": str(sum(count > 1 for count in self.classes.values())),
        }


def iter_docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and ast.get_docstring(node) is not None:
                yield first


def get_end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def find_importers(modules: dict[str, tuple[bool, ast.Module]]) -> dict[str, set[str]]:
    """Which other modules import each one, by dotted names. Each module comes with whether it is a
    package.
    """
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, (is_package, tree) in modules.items():
        package = name.split(".") if is_package else name.split(".")[:-1]
        for base, imported in iter_imports(tree, package):
            member = strip_root(f"{base}.{imported}")
            target = member if member in modules else strip_root(base)
            if target in modules and target != name:
                importers[target].add(name)
    return importers


def iter_imports(tree: ast.Module, package: list[str]) -> Iterator[tuple[str, str]]:
    """The imported modules, each with the name that is imported from it, or without one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from ((base, alias.name) for alias in node.names)


def strip_root(name: str) -> str:
    """`agent` and `server` are installed as `hangwatch.agent` and `hangwatch.server`."""
    return (
        name.removeprefix("hangwatch.") if name.split(".")[1:2] in (["agent"], ["server"]) else name
    )


def measure_tree(name: str, *folders: Path) -> CodeMetrics:
    """The metrics of all modules below ``folders``, except tests and empty modules."""
    metrics = CodeMetrics(name=name)
    trees: dict[str, tuple[bool, ast.Module]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            source = path.read_text(encoding="utf-8")
            if not source.strip() or not SKIPPED_FOLDERS.isdisjoint(parts):
                continue
            tree = ast.parse(source)
            metrics.add_module(source, tree)
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            trees[module] = (is_package, tree)
    metrics.importers = find_importers(trees)
    return metrics


def print_table(rows: Sequence[dict[str, str]]) -> None:
    """The first column is on the left, the others on the right."""
    first, *others = rows[0]
    for row in ({title: title for title in rows[0]}, *rows):
        cells = [f"{row[title]:>{len(title) + 2}}" for title in others]
        print(f"{row[first]:12}" + "".join(cells))


def main(arguments: Sequence[str]) -> int:
    measured = [measure_tree(part, ROOT / part) for part in PARTS]
    measured.append(measure_tree("all three", *(ROOT / part for part in PARTS)))
    missing = []
    for name in arguments or MODELS:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            missing.append(MODELS.get(name, name))
        else:
            measured.append(measure_tree(name, Path(spec.origin).parent))
    print_table([metrics.format_cells() for metrics in measured])
    if missing:
        print(f"not installed: pip install {' '.join(missing)}", file=sys.stderr)
    return int(bool(missing and arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
