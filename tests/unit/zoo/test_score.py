"""The zoo's own arithmetic: what counts as right, missed and claimed without cause."""

from __future__ import annotations

from typing import Any

from tests.harness.expected import Expected, names
from tests.harness.verdicts import Outcome
from tests.zoo.score import Score, score, table


def incident(kind: str, *culprits: int, severity: str = "alert") -> dict[str, Any]:
    return {"kind": kind, "culprits": list(culprits), "severity": severity}


def hang(kind: str, *culprits: int, severity: str = "alert") -> Expected:
    return Expected(ranks=4, kind=kind, culprits=culprits, severity=severity)


def by_kind(*runs: tuple[Expected, Outcome]) -> dict[str, Score]:
    return {row.kind: row for row in score(runs)}


def test_right_is_kind_and_culprits() -> None:
    rows = by_kind(
        (
            hang("deadlock", 0, 1),
            Outcome(name="a", seconds=2.0, incidents=[incident("deadlock", 1, 0)]),
        ),
        (
            hang("deadlock", 0, 1),
            Outcome(name="b", incidents=[incident("deadlock", 2, 3)], problems=["culprits"]),
        ),
    )
    assert (rows["deadlock"].precision, rows["deadlock"].recall) == (0.5, 0.5)
    assert rows["deadlock"].as_expected == 1
    assert rows["deadlock"].seconds == [2.0]


def test_another_kind_costs_the_recall_of_one_and_the_precision_of_the_other() -> None:
    rows = by_kind(
        (
            hang("exited_rank", 2),
            Outcome(name="a", incidents=[incident("dead_rank", 1)], problems=["kind"]),
        )
    )
    assert (rows["exited_rank"].recall, rows["exited_rank"].precision) == (0.0, None)
    assert (rows["dead_rank"].recall, rows["dead_rank"].precision) == (None, 0.0)
    assert (rows["all"].recall, rows["all"].precision) == (0.0, 0.0)


def test_an_alert_on_a_healthy_job_and_a_second_one_on_a_hang_are_wrong() -> None:
    twice = Outcome(name="b", incidents=[incident("dead_rank", 1), incident("dead_rank", 1)])
    rows = by_kind(
        (Expected(ranks=2, healthy=True), Outcome(name="a", incidents=[incident("dead_rank", 0)])),
        (hang("dead_rank", 1), twice),
    )
    assert rows["dead_rank"].claimed == 3
    assert rows["dead_rank"].right == 1
    assert rows["all"].programs == 1


def test_a_warning_counts_only_where_one_is_due() -> None:
    warned = Outcome(name="a", incidents=[incident("slow_rank", 1, severity="warning")])
    assert by_kind((hang("slow_rank", 1, severity="warning"), warned))["slow_rank"].precision == 1.0
    assert by_kind((Expected(ranks=2, healthy=True), warned))["all"].claimed == 0


def test_table_has_a_line_per_kind_and_says_nothing_of_what_it_does_not_know() -> None:
    lines = list(table(score([(hang("deadlock", 0, 1), Outcome(name="a", problems=["no alert"]))])))
    assert [line.split()[0] for line in lines] == ["kind", "deadlock", "all"]
    assert lines[1].split()[1:] == ["1", "0", "0", "%"]


def test_the_zoo_is_as_large_as_it_says_and_its_part_for_the_tests_has_both_sides() -> None:
    assert len(names(healthy=False)) >= 45
    assert len(names(healthy=True)) >= 25
    assert 0 < len(names(healthy=False, ci=True)) < len(names(healthy=False))
    assert 0 < len(names(healthy=True, ci=True)) < len(names(healthy=True))
