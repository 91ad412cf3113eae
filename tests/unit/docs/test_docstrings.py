"""What docstrings, comments and pages show and name is true: examples run, and names exist."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
# The folders of the packages, and their names once installed.
PACKAGES = {"hangwatch": "hangwatch", "agent": "hangwatch.agent", "server": "hangwatch.server"}
# A file of this project in backticks, such as `graph/edges.py`, or by its full path.
PATH = re.compile(
    r"(?<=`)(?:[\w.-]+/)+[\w.-]+\.(?:py|md|cpp|sql)(?=`)"
    r"|(?<![\w./-])(?:hangwatch|agent|server|tests|docs)/[\w./-]+\.(?:py|md|cpp|sql)\b"
)
PLACEHOLDER = re.compile(r"\b[A-Z]+/")  # tests/zoo/NAME/program.py
DOTTED_NAME = re.compile(r"`((?:hangwatch|agent|server|tests)(?:\.\w+)+)")
SETTINGS_FILE = "hangwatch.toml"


def list_modules_with_examples() -> Iterator[str]:
    for folder, package in PACKAGES.items():
        for path in sorted((PROJECT / folder).rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(PROJECT / folder).with_suffix("").parts
                yield ".".join([package, *parts])


@pytest.mark.parametrize("name", list(list_modules_with_examples()))
def test_examples_of_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def list_files() -> list[str]:
    """The files of the project, without those of others."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return [
        name
        for name in names.stdout.splitlines()
        if "/vendor/" not in name and (PROJECT / name).is_file()
    ]


def is_name_known(name: str) -> bool:
    """Whether a dotted name is a package, a module, or occurs in its module."""
    parts = name.split(".")
    if name.startswith(("hangwatch.agent", "hangwatch.server")):
        del parts[0]
    for count in range(len(parts), 0, -1):
        path = PROJECT.joinpath(*parts[:count])
        for module in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if module.is_file():
                text = module.read_text()
                return all(re.search(rf"\b{part}\b", text) for part in parts[count:])
        if path.is_dir():
            return count == len(parts)
    return False


def test_named_modules_functions_and_files_exist() -> None:
    files = list_files()
    unknown = []
    for file in files:
        if not file.endswith((".py", ".md", ".cpp", ".h", ".html")):
            continue
        text = (PROJECT / file).read_text()
        unknown += [
            f"{file}: {name}"
            for name in DOTTED_NAME.findall(text)
            if name != SETTINGS_FILE and not is_name_known(name)
        ]
        unknown += [
            f"{file}: {path}"
            for path in PATH.findall(text)
            if not path.startswith("torch/")
            and not PLACEHOLDER.search(path)
            and not any(f"/{f}".endswith(f"/{path}") for f in files)
        ]
    assert not unknown
