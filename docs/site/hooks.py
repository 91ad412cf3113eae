"""Generates the parts of the documentation that the code defines, when the site is built.

A page includes a part by a line such as ``<!-- generated: settings -->``. Whole pages come from files
outside of docs/: the changelog, the contributor's guide, the security policy, and the notes on the
files of deploy/.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hangwatch.agent.cli.commands.mcp import analyze_dumps
from hangwatch.agent.cli.main import build_parser as build_client_parser
from hangwatch.mcp.tools import TOOLS
from hangwatch.model.bounds import TYPE_BOUNDS, Bounds
from hangwatch.model.kinds import KINDS, Abort, VerdictKind
from hangwatch.protocol.heartbeat import Heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core.limits import LIMITS
from hangwatch.server.settings import Settings, format_flag
from hangwatch.server.settings import build_parser as build_server_parser
from hangwatch.server.storage.store import Store

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES_DIR = PROJECT / "docs" / "examples"
REMEDIES_DIR = PROJECT / "docs" / "remedies"
PLACEHOLDER = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
COPIED_PAGES = {
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "deployment-files.md": "deploy/README.md",
}
ABORT_TEXT = {
    Abort.NEVER: "never ends ranks for it",
    Abort.ON_REQUEST: "ends its ranks only if `--abort-kinds` names it",
    Abort.BY_DEFAULT: "ends its ranks",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages whose source is outside of docs/."""
    for name, source in COPIED_PAGES.items():
        text = adapt_links((PROJECT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces each placeholder by the part that it names. Raises KeyError for an unknown one."""
    return PLACEHOLDER.sub(lambda match: "\n".join(PARTS[match[1]]()), markdown)


def adapt_links(markdown: str) -> str:
    """Links from the project's folder become links from docs/; to files without a page, text."""
    pages = {source: name for name, source in COPIED_PAGES.items()}

    def adapt_link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if re.match(r"https?://|#", target):
            return match.group(0)
        if target in pages:
            return f"[{text}]({pages[target]})"
        if target.startswith("docs/") and target.endswith(".md"):
            return f"[{text}]({target.removeprefix('docs/')})"
        return text if text.startswith("`") else f"`{text}`"

    return re.sub(r"(?<!!)\[([^\]\[]+)\]\(([^)\s]+)\)", adapt_link, markdown)


def list_limits() -> Iterator[str]:
    """The limits of the server."""
    yield "| Name | Limit |"
    yield "|---|---|"
    for limit in LIMITS:
        yield f"| `{limit.name}` | {limit.text} |"


def list_bounds() -> Iterator[str]:
    """The bounds of the fields of heartbeats, from their annotations."""
    yield "| Fields | Values |"
    yield "|---|---|"
    fields: dict[str, list[str]] = {}
    for path, bounds in iter_bounds(Heartbeat, "Heartbeat", set()):
        unit = " characters" if bounds.pattern else ""
        text = f"{bounds.least:.15g} to {bounds.greatest:.15g}{unit}"
        fields.setdefault(text, []).append(f"`{path}`")
    for text, paths in fields.items():
        yield f"| {', '.join(dict.fromkeys(paths))} | {text} |"
    for kind, bounds in TYPE_BOUNDS.items():
        unit = " characters" if kind is str else ""
        yield f"| any other `{kind.__name__}` | {bounds.least:.15g} to {bounds.greatest:.15g}{unit} |"


def iter_bounds(hint: Any, path: str, seen: set[type]) -> Iterator[tuple[str, Bounds]]:
    """MESSAGE.FIELD and the bounds of each field that has some in its annotation."""
    if isinstance(hint, type) and hasattr(hint, "__annotations__"):
        if hint not in seen:
            seen.add(hint)
            for name, inner in get_type_hints(hint, include_extras=True).items():
                yield from iter_bounds(inner, f"{hint.__name__}.{name}", seen)
    elif get_origin(hint) is Annotated:
        yield path, get_args(hint)[1]
    else:
        for argument in get_args(hint):
            yield from iter_bounds(argument, path, seen)


def list_settings() -> Iterator[str]:
    """The settings of the server, from the model."""
    helps = {
        action.dest: action.help or "" for action in build_server_parser()._actions if action.dest
    }
    yield "| flag | variable | key of `hangwatch.toml` | meaning |"
    yield "|---|---|---|---|"
    for name in Settings.model_fields:
        meaning = re.sub(r" \[HANGWATCH_\w+\]$", "", helps[name]).replace("%%", "%")
        meaning = meaning.replace("|", "\\|")
        yield f"| `{format_flag(name)}` | `HANGWATCH_{name.upper()}` | `{name}` | {meaning} |"


def list_commands() -> Iterator[str]:
    """The help of each command, from the parsers."""
    client = build_client_parser()
    yield from format_command("hangwatch-server", build_server_parser())
    yield from format_command("hangwatch", client)
    for action in client._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                yield from format_command(f"hangwatch {name}", parser)


def format_command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"## `{name}`"
    yield ""
    yield "```text"
    yield parser.format_help().rstrip()
    yield "```"
    yield ""


def list_tools() -> Iterator[str]:
    """The tools of the Model Context Protocol."""
    yield "| tool | arguments | does |"
    yield "|---|---|---|"
    for tool in (*TOOLS, analyze_dumps):
        arguments = [f"`{name}`" for name in tool.properties]
        yield f"| `{tool.name}` | {', '.join(arguments)} | {tool.description} |"


def list_endpoints() -> Iterator[str]:
    """The HTTP endpoints, from the server's OpenAPI document."""
    yield "| request | parameters | does |"
    yield "|---|---|---|"
    for path, methods in build_openapi()["paths"].items():
        for method, operation in methods.items():
            parameters = [
                f"`{parameter['name']}`"
                for parameter in operation.get("parameters", [])
                if parameter["in"] == "query"
            ]
            summary = operation.get("description") or operation.get("summary") or ""
            text = " ".join(summary.split("\n\n")[0].split()).replace("|", "\\|")
            yield f"| `{method.upper()} {path}` | {', '.join(parameters)} | {text} |"


def build_openapi() -> dict[str, Any]:
    """The OpenAPI document of a server with a token."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), None, "docs")
        try:
            settings = Settings(data_dir=Path(folder))
            app, _ = build_app(settings, store=store, base_url="http://docs", token="x" * 32)
            while not hasattr(app, "openapi"):
                app = app._app  # type: ignore[attr-defined]
            document: dict[str, Any] = app.openapi()
        finally:
            store.close()
    return document


def list_kinds() -> Iterator[str]:
    """The table of kinds, as in the README."""
    yield "| kind | means | severity | when |"
    yield "|---|---|---|---|"
    for kind, spec in KINDS.items():
        link = f"[`{kind.value}`](kinds.md#{kind.value})"
        yield f"| {link} | {spec.meaning} | {spec.severity.value} | {spec.timing.value} |"


def list_kind_sections() -> Iterator[str]:
    """A section for each kind: its properties, an example from a real job, and the remedy."""
    for kind in KINDS:
        yield f"## {kind.value}"
        yield ""
        yield from list_kind_facts(kind)
        yield ""


def list_kind_facts(kind: VerdictKind) -> Iterator[str]:
    spec = KINDS[kind]
    yield f"{spec.meaning[0].upper()}{spec.meaning[1:]}."
    yield ""
    yield f"Severity: {spec.severity.value}. Reported: {spec.timing.value}."
    yield f"`--on-hang abort` {ABORT_TEXT[spec.abort]}."
    yield ""
    yield "```text"
    yield (EXAMPLES_DIR / f"{kind.value}.txt").read_text(encoding="utf-8").rstrip()
    yield "```"
    yield ""
    yield "**What to do.**"
    yield ""
    yield (REMEDIES_DIR / f"{kind.value}.md").read_text(encoding="utf-8").rstrip()


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "bounds": list_bounds,
    "settings": list_settings,
    "commands": list_commands,
    "endpoints": list_endpoints,
    "kinds": list_kinds,
    "kind-sections": list_kind_sections,
    "limits": list_limits,
    "tools": list_tools,
}
