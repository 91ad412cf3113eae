"""The zoo's own arithmetic: what counts as right, missed and claimed without cause."""

from __future__ import annotations

from typing import Any

from tests.harness.expected import ExpectedVerdict, list_programs
from tests.harness.verdicts import ProgramOutcome
from tests.zoo.score import KindScore, format_table, score_outcomes


def make_incident(kind: str, *culprits: int, severity: str = "alert") -> dict[str, Any]:
    return {"kind": kind, "culprits": list(culprits), "severity": severity}


def make_expected_hang(kind: str, *culprits: int, severity: str = "alert") -> ExpectedVerdict:
    return ExpectedVerdict(ranks=4, kind=kind, culprits=culprits, severity=severity)


def score_by_kind(*runs: tuple[ExpectedVerdict, ProgramOutcome]) -> dict[str, KindScore]:
    return {row.kind: row for row in score_outcomes(runs)}


def test_right_means_kind_and_culprits() -> None:
    rows = score_by_kind(
        (
            make_expected_hang("deadlock", 0, 1),
            ProgramOutcome(
                name="a", verdict_after_s=2.0, incidents=[make_incident("deadlock", 1, 0)]
            ),
        ),
        (
            make_expected_hang("deadlock", 0, 1),
            ProgramOutcome(
                name="b", incidents=[make_incident("deadlock", 2, 3)], problems=["culprits"]
            ),
        ),
    )
    assert (rows["deadlock"].precision, rows["deadlock"].recall) == (0.5, 0.5)
    assert rows["deadlock"].as_expected_count == 1
    assert rows["deadlock"].verdict_times_s == [2.0]


def test_another_kind_costs_the_recall_of_one_and_the_precision_of_the_other() -> None:
    rows = score_by_kind(
        (
            make_expected_hang("exited_rank", 2),
            ProgramOutcome(name="a", incidents=[make_incident("dead_rank", 1)], problems=["kind"]),
        )
    )
    assert (rows["exited_rank"].recall, rows["exited_rank"].precision) == (0.0, None)
    assert (rows["dead_rank"].recall, rows["dead_rank"].precision) == (None, 0.0)
    assert (rows["all"].recall, rows["all"].precision) == (0.0, 0.0)


def test_an_alert_on_a_healthy_job_and_a_second_one_on_a_hang_are_wrong() -> None:
    twice = ProgramOutcome(
        name="b", incidents=[make_incident("dead_rank", 1), make_incident("dead_rank", 1)]
    )
    rows = score_by_kind(
        (
            ExpectedVerdict(ranks=2, healthy=True),
            ProgramOutcome(name="a", incidents=[make_incident("dead_rank", 0)]),
        ),
        (make_expected_hang("dead_rank", 1), twice),
    )
    assert rows["dead_rank"].claimed_count == 3
    assert rows["dead_rank"].right_count == 1
    assert rows["all"].program_count == 1


def test_warning_counts_only_if_expected() -> None:
    warned = ProgramOutcome(name="a", incidents=[make_incident("slow_rank", 1, severity="warning")])
    assert (
        score_by_kind((make_expected_hang("slow_rank", 1, severity="warning"), warned))[
            "slow_rank"
        ].precision
        == 1.0
    )
    assert score_by_kind((ExpectedVerdict(ranks=2, healthy=True), warned))["all"].claimed_count == 0


def test_table_has_line_per_kind_and_omits_unknown() -> None:
    lines = list(
        format_table(
            score_outcomes(
                [
                    (
                        make_expected_hang("deadlock", 0, 1),
                        ProgramOutcome(name="a", problems=["no alert"]),
                    )
                ]
            )
        )
    )
    assert [line.split()[0] for line in lines] == ["kind", "deadlock", "all"]
    assert lines[1].split()[1:] == ["1", "0", "0", "%"]


def test_zoo_size_and_ci_selection() -> None:
    assert len(list_programs(healthy=False)) >= 45
    assert len(list_programs(healthy=True)) >= 25
    assert 0 < len(list_programs(healthy=False, ci=True)) < len(list_programs(healthy=False))
    assert 0 < len(list_programs(healthy=True, ci=True)) < len(list_programs(healthy=True))
