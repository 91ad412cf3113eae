"""The documentation covers what the code defines, agrees with it, and can be read offline."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hangwatch.agent.cli.main import build_parser
from hangwatch.model.kinds import VerdictKind
from hangwatch.server.settings import Settings, format_flag
from tests.verdict_examples import build_kind_table

PROJECT = Path(__file__).parents[3]
DOCS = PROJECT / "docs"
README_LIMIT_LINES = 200
README_COMMANDS = (
    "python3 -m venv .venv",
    ".venv/bin/pip install -e '.[test]'",
    ".venv/bin/hangwatch demo",
    ".venv/bin/python -m pytest",
)
LOADING_ATTRIBUTES = {"script": "src", "img": "src", "iframe": "src", "object": "data"}
LOADING_RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    config = DOCS / "site" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    built = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def read_page(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


class LoadedAddresses(HTMLParser):
    """What a browser loads for a page. Links that a reader may follow do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(LOADING_ATTRIBUTES.get(tag, ""))
        relations = set((values.get("rel") or "").split())
        if tag == "link" and relations & LOADING_RELATIONS:
            address = values.get("href")
        if address is not None:
            self.addresses.append(address)
        # The theme loads Mermaid from another host where a page has such a block.
        assert "mermaid" not in (values.get("class") or "").split()


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = LoadedAddresses()
        loaded.feed(page.read_text(encoding="utf-8"))
        external = [a for a in loaded.addresses if re.match(r"(\w+:)?//", a)]
        assert external == [], page.name
    for path in (*site.rglob("*.css"), *site.rglob("*.svg")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(url\(|@import|href=)\s*[\"']?(https?:)?//", text), path.name


def test_settings_are_documented(site: Path) -> None:
    page = read_page(site, "configuration")
    for name in Settings.model_fields:
        for spelling in (format_flag(name), f"HANGWATCH_{name.upper()}", name):
            assert f"<code>{spelling}</code>" in page


def test_environment_variables_are_documented(site: Path) -> None:
    page = read_page(site, "configuration")
    sources = "".join(
        path.read_text(encoding="utf-8")
        for part in ("hangwatch", "agent", "server")
        for path in (PROJECT / part).rglob("*.py")
    )
    variables = set(re.findall(r"\bHANGWATCH_[A-Z][A-Z_]*[A-Z]\b", sources))
    assert {"HANGWATCH_URL", "HANGWATCH_CHECKS"} <= variables
    assert [name for name in sorted(variables) if name not in page] == []


def test_commands_and_their_options_are_documented(site: Path) -> None:
    page = read_page(site, "cli")
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for name, parser in commands.items():
        assert f"<code>hangwatch {name}</code>" in page
        for option in parser._option_string_actions:
            assert option in page


def test_endpoints_are_documented(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    from hooks import build_openapi

    page = read_page(site, "api")
    documented = set(re.findall(r"<code>([A-Z]+ /[^<]+)</code>", page))
    served = {
        f"{method.upper()} {path}"
        for path, methods in build_openapi()["paths"].items()
        for method in methods
    }
    assert {"GET /api/v1/incidents", "POST /api/v1/dumps", "GET /metrics"} <= served
    assert sorted(served - documented) == []


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_kind_is_documented_with_an_example(kind: VerdictKind, site: Path) -> None:
    page = read_page(site, "kinds")
    assert f'id="{kind.value}"' in page
    example = (DOCS / "examples" / f"{kind.value}.txt").read_text(encoding="utf-8")
    assert kind.value in example.splitlines()[0]
    assert "/tmp" not in example


def test_readme_table_of_kinds_is_that_of_the_code() -> None:
    # `python -m tests.verdict_examples` writes it.
    assert f"\n{build_kind_table()}\n" in (PROJECT / "README.md").read_text(encoding="utf-8")


def test_readme_is_short_and_has_the_set_up_commands() -> None:
    lines = (PROJECT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LIMIT_LINES
    assert [command for command in README_COMMANDS if command not in lines] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_to_files_of_the_project_exist(name: str) -> None:
    text = (PROJECT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    missing = [t for t in targets if not t.startswith("http") and not (PROJECT / t).exists()]
    assert missing == []


@pytest.mark.parametrize("source", sorted((DOCS / "diagrams").glob("*.mmd")), ids=lambda p: p.stem)
def test_diagram_was_rendered_from_its_source(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    from render_diagrams import hash_source

    picture = source.with_suffix(".svg").read_text(encoding="utf-8")
    assert hash_source(source.read_text(encoding="utf-8")) in picture.splitlines()[0]
