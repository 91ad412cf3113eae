"""SECURITY.md claims nothing that no test shows: the docstring of a test quotes the sentences that it shows,
or parts of them, as ``SECURITY.md: "…", "…"``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hangwatch.protocol.codec import MAX_COMMANDS
from hangwatch.protocol.request_signing import MAX_REQUEST_AGE_S
from hangwatch.server.core import limits, logs
from hangwatch.tracking.fleet import OWNER_SILENT_S

PROJECT = Path(__file__).parents[3]
PREFIX = "SECURITY.md:"
# The headings of the sections that claim nothing: how to report, and where the tests are.
OTHER_SECTIONS = ("Reporting a vulnerability", "What is tested")
# Parts of sentences that only advise.
NO_CLAIMS = ("Keep the token out of command lines",)


def strip_markup(text: str) -> str:
    """One line without emphasis, code marks and addresses of links."""
    return " ".join(re.sub(r"\]\([^)]*\)|[\[*`]", "", text).split())


def iter_statements() -> Iterator[str]:
    """The sentences of SECURITY.md, and the cells of its table with what somebody may do."""
    page = (PROJECT / "SECURITY.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        heading, _, content = section.partition("\n")
        if heading in OTHER_SECTIONS:
            continue
        # Without the head of the table
        _, _, content = content.rpartition("|---|---|---|\n")
        for item in re.split(r"\n{1,2}- |\n\n|\n(?=\|)", content):
            if item.startswith("|"):
                sentences = item.split("|")[2:]
            elif item.endswith(":"):  # the title of a list
                continue
            else:
                sentences = re.split(r"(?<=\.)(?:\*\*)?\s+(?=[A-Z`*])", item)
            yield from (strip_markup(sentence) for sentence in sentences if sentence.strip())


def iter_quotations() -> Iterator[tuple[str, str]]:
    """The name of each test that quotes SECURITY.md, and what it quotes."""
    for path in sorted((PROJECT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if PREFIX not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                _, _, quoted = (ast.get_docstring(node) or "").partition(PREFIX)
                for quotation in re.findall(r'"([^"]+)"', quoted):
                    yield f"{path.name}::{node.name}", strip_markup(quotation)


def test_security_page_has_the_numbers_of_the_code() -> None:
    page = " ".join(iter_statements())
    for text in (
        f"execute {MAX_COMMANDS:,} commands",
        f"accepted once, within {MAX_REQUEST_AGE_S:.0f} seconds",
        f"may have {limits.UNAUTHENTICATED.maximum} connections on which no request was accepted",
        f"Until that has been silent for {OWNER_SILENT_S:.0f} seconds",
        f"have {limits.OPEN_INCIDENTS.maximum} open incidents",
        f"each of at most {logs.MAX_LENGTH:,} characters",
    ):
        assert text in page


def test_tests_quote_sentences_of_the_security_page() -> None:
    statements = list(iter_statements())
    unknown = [
        (test, quotation)
        for test, quotation in iter_quotations()
        if not any(quotation in statement for statement in statements)
    ]
    assert unknown == []


def test_each_sentence_of_the_security_page_is_quoted_by_a_test() -> None:
    quotations = [quotation for _, quotation in iter_quotations()]
    untested = [
        statement
        for statement in iter_statements()
        if not any(part in statement for part in (*quotations, *NO_CLAIMS))
    ]
    assert len(quotations) > 50 and untested == []
