"""Each kind of verdict is complete: it has its properties, a rule, documentation and a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hangwatch.diagnosis
from hangwatch.diagnosis.engine import RULES
from hangwatch.model.kind_spec import StackAdvice
from hangwatch.model.kinds import KINDS, VerdictKind

PROJECT = Path(__file__).parents[3]
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


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_kind_has_a_rule_that_makes_it(kind: VerdictKind) -> None:
    assert f"VerdictKind.{kind.name}" in read_sources(RULES_FOLDER)


def test_every_rule_is_registered() -> None:
    registered = {f"{rule.__module__}.{rule.__name__}" for rule in RULES}
    assert len(registered) == len(RULES)
    modules = {rule.__module__.rpartition(".")[2] for rule in RULES}
    for path in RULES_FOLDER.glob("*.py"):
        if "\ndef diagnose_" in path.read_text() and path.stem != "timeouts":
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
        assert spec.names_culprits
    if spec.is_unreachable:
        assert not spec.has_culprit_line
