"""Scores the verdicts against the expected ones: precision, recall and seconds to verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from tests.harness.expected import ExpectedVerdict
from tests.harness.verdicts import ProgramOutcome


@dataclass(slots=True, kw_only=True)
class KindScore:
    """For one kind: the programs that expect it, those that got it with the right culprits, and all
    verdicts of the kind.
    """

    kind: str
    program_count: int = 0
    right_count: int = 0
    claimed_count: int = 0
    as_expected_count: int = 0  # in time, with the planted line, and alone
    verdict_times_s: list[float] = field(default_factory=list)

    @property
    def precision(self) -> float | None:
        """The share of this kind's verdicts that are right; None if there are none."""
        return self.right_count / self.claimed_count if self.claimed_count else None

    @property
    def recall(self) -> float | None:
        """The share of this kind's programs that got the right verdict; None if there are none."""
        return self.right_count / self.program_count if self.program_count else None


def score_outcomes(runs: Iterable[tuple[ExpectedVerdict, ProgramOutcome]]) -> list[KindScore]:
    """Scores by kind in alphabetical order, with ``all`` last. Every verdict on a healthy job counts
    as wrong.
    """
    kinds: dict[str, KindScore] = {}
    total = KindScore(kind="all")
    for expected, outcome in runs:
        expected_score = (
            kinds.setdefault(expected.kind, KindScore(kind=expected.kind))
            if not expected.healthy
            else None
        )
        for score in (expected_score, total) if expected_score is not None else ():
            score.program_count += 1
            score.as_expected_count += outcome.is_ok
            if outcome.verdict_after_s is not None:
                score.verdict_times_s.append(outcome.verdict_after_s)
        is_named = False
        for kind, culprits in _iter_claims(expected, outcome):
            kind_score = kinds.setdefault(kind, KindScore(kind=kind))
            is_right = (
                not expected.healthy
                and not is_named
                and (kind, culprits) == (expected.kind, expected.culprits)
            )
            is_named |= is_right
            for score in (kind_score, total):
                score.claimed_count += 1
                score.right_count += is_right
    return [*(kinds[kind] for kind in sorted(kinds)), total]


def _iter_claims(
    expected: ExpectedVerdict, outcome: ProgramOutcome
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields kind and culprits of each alert, and of warnings of the expected kind: other warnings do
    not claim a hang.
    """
    for incident in outcome.incidents:
        if incident["severity"] == "alert" or (
            expected.severity == "warning" and incident["kind"] == expected.kind
        ):
            yield incident["kind"], tuple(sorted(incident["culprits"]))


def format_table(rows: Iterable[KindScore]) -> Iterator[str]:
    """Yields the table's lines. ``as expected`` counts the programs whose entire outcome matches: the
    planted line, the time, and no other incident.
    """
    yield (
        f"{'kind':<16} {'programs':>8} {'as expected':>11} {'precision':>9} {'recall':>7}"
        f" {'median s':>8} {'slowest s':>9}"
    )
    for row in rows:
        middle, last = (
            (f"{median(row.verdict_times_s):.1f}", f"{max(row.verdict_times_s):.1f}")
            if row.verdict_times_s
            else ("", "")
        )
        shares = f"{_format_percent(row.precision):>9} {_format_percent(row.recall):>7}"
        yield (
            f"{row.kind:<16} {row.program_count:>8} {row.as_expected_count:>11} {shares}"
            f" {middle:>8} {last:>9}"
        )


def _format_percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
