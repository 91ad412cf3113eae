"""Each kind of verdict is complete: it has its properties, a rule, documentation and a real job."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import hangwatch.diagnosis
from hangwatch.diagnosis.engine import RULES
from hangwatch.diagnosis.rules.absence import KIND_PRECEDENCE, MESSAGE_MAKERS
from hangwatch.model.kinds import KINDS, StackAdvice, VerdictKind
from hangwatch.model.verdicts import Verdict

PROJECT = Path(__file__).parents[4]
RULES_FOLDER = Path(hangwatch.diagnosis.__file__).parent / "rules"

# Kinds that no zoo program can show, with the test of a real job that does.
SHOWN_ELSEWHERE = {
    # A host must disappear: the hosts are network namespaces there.
    VerdictKind.LOST_NODE: "tests/integration",
    # A network or a device must fail below the job.
    VerdictKind.NO_PROGRESS: "tests/integration",
}


def read_sources(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*.py")))


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_kind_has_properties_and_documentation(kind: VerdictKind) -> None:
    assert KINDS[kind].meaning
    documentation = (PROJECT / "README.md").read_text()
    for page in sorted((PROJECT / "docs").rglob("*.md")):
        documentation += page.read_text()
    rows = [line for line in documentation.splitlines() if line.startswith("| `")]
    assert any(f"`{kind.value}`" in row.split("|")[1] for row in rows), "no table of kinds has it"
    assert (PROJECT / "docs" / "remedies" / f"{kind.value}.md").read_text().strip()


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_kind_has_a_rule_that_makes_it(kind: VerdictKind) -> None:
    assert f"VerdictKind.{kind.name}" in read_sources(RULES_FOLDER)


def iter_verdict_arguments() -> Iterator[tuple[str, dict[str, str]]]:
    """The module and the source of each argument, for each place where a rule makes a verdict."""
    for path in sorted(RULES_FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Verdict":
                yield (
                    path.stem,
                    {str(k.arg): ast.unparse(k.value) for k in node.keywords},
                )


def test_every_verdict_has_a_summary_and_advice() -> None:
    for module, arguments in iter_verdict_arguments():
        if module != "absence":  # that rule takes them from `MESSAGE_MAKERS`
            assert {"summary", "advice"} <= arguments.keys(), f"in rules/{module}.py"


def test_rank_that_cannot_make_the_call_precedes_one_that_may_still_make_it() -> None:
    """The precedence is the order of a table that also says which kinds have messages."""
    assert tuple(MESSAGE_MAKERS) == KIND_PRECEDENCE
    assert KIND_PRECEDENCE == (
        VerdictKind.EXITED_RANK,
        VerdictKind.FROZEN_RANK,
        VerdictKind.LOST_NODE,
        VerdictKind.STARTUP_STALL,
        VerdictKind.MISSING_RANK,
        VerdictKind.SLOW_RANK,
    )


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_verdict_has_the_severity_of_its_kind(kind: VerdictKind) -> None:
    assert Verdict(kind=kind, culprits=(), waiting=()).severity is KINDS[kind].severity


def test_rules_give_no_verdict_another_severity() -> None:
    """The exceptions are late starts and quiet jobs, which are warnings at first."""
    allowed = ("absence", "quiet", "start")
    for module, arguments in iter_verdict_arguments():
        assert "severity" not in arguments or module in allowed, f"in {module}.py"


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_real_verdict_shows_a_summary_and_advice(kind: VerdictKind) -> None:
    """The documented example has a head line, the summary and, after an empty line, the advice."""
    example = (PROJECT / "docs" / "examples" / f"{kind.value}.txt").read_text(encoding="utf-8")
    summary, advice = example.split("\n\n")[:2]
    assert len(summary.splitlines()) > 1
    assert advice.endswith((".", "?"))


def test_every_rule_is_registered() -> None:
    registered = {f"{rule.__module__}.{rule.__name__}" for rule in RULES}
    assert len(registered) == len(RULES)
    modules = {rule.__module__.rpartition(".")[2] for rule in RULES}
    for path in RULES_FOLDER.glob("*.py"):
        if "\ndef diagnose_" in path.read_text() and path.stem not in ("timeouts", "watchdogs"):
            assert path.stem in modules, "its rule never runs"


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_kind_is_shown_by_a_real_job(kind: VerdictKind) -> None:
    expected = [json.loads(p.read_text()) for p in (PROJECT / "tests/zoo").rglob("expected.json")]
    if kind in SHOWN_ELSEWHERE:
        sources = read_sources(PROJECT / SHOWN_ELSEWHERE[kind])
        assert kind.value in sources
    else:
        assert kind.value in {program.get("kind") for program in expected}


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_properties_of_kind_are_consistent(kind: VerdictKind) -> None:
    spec = KINDS[kind]
    if spec.stack_advice is not StackAdvice.NONE or spec.culprit_state is not None:
        assert kind is not VerdictKind.NO_PROGRESS, "it names no culprit"
    if spec.is_unreachable:
        assert not spec.has_culprit_line
