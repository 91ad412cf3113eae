"""How good the verdicts are: precision, recall and seconds to verdict, from what the programs had
to give and gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from tests.harness.expected import ExpectedVerdict
from tests.harness.verdicts import ProgramOutcome


@dataclass(slots=True, kw_only=True)
class KindScore:
    """Of one kind: the programs that had to give it, those that did with the right culprits, and
    all verdicts of it.
    """

    kind: str
    program_count: int = 0
    right_count: int = 0
    claimed_count: int = 0
    as_expected_count: int = 0  # in time, with the planted line, and alone
    verdict_times_s: list[float] = field(default_factory=list)

    @property
    def precision(self) -> float | None:
        """Of the verdicts of this kind, the part that was right; None where there was none."""
        return self.right_count / self.claimed_count if self.claimed_count else None

    @property
    def recall(self) -> float | None:
        """Of the programs of this kind, the part that got it; None where there was none."""
        return self.right_count / self.program_count if self.program_count else None


def score_outcomes(runs: Iterable[tuple[ExpectedVerdict, ProgramOutcome]]) -> list[KindScore]:
    """By kind, in the order of the alphabet, and ``all`` last. A verdict on a healthy job is one
    that is not right.
    """
    kinds: dict[str, KindScore] = {}
    every = KindScore(kind="all")
    for expected, outcome in runs:
        wanted = (
            kinds.setdefault(expected.kind, KindScore(kind=expected.kind))
            if not expected.healthy
            else None
        )
        for row in (wanted, every) if wanted is not None else ():
            row.program_count += 1
            row.as_expected_count += outcome.is_ok
            if outcome.verdict_after_s is not None:
                row.verdict_times_s.append(outcome.verdict_after_s)
        named = False
        for kind, culprits in _iter_claims(expected, outcome):
            told = kinds.setdefault(kind, KindScore(kind=kind))
            hit = (
                not expected.healthy
                and not named
                and (kind, culprits) == (expected.kind, expected.culprits)
            )
            named |= hit
            for row in (told, every):
                row.claimed_count += 1
                row.right_count += hit
    return [*(kinds[kind] for kind in sorted(kinds)), every]


def _iter_claims(
    expected: ExpectedVerdict, outcome: ProgramOutcome
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The alerts; of warnings those of a kind that a program is about, as others are no claim that
    something hangs.
    """
    for incident in outcome.incidents:
        if incident["severity"] == "alert" or (
            expected.severity == "warning" and incident["kind"] == expected.kind
        ):
            yield incident["kind"], tuple(sorted(incident["culprits"]))


def format_table(rows: Iterable[KindScore]) -> Iterator[str]:
    """Its lines. ``as expected`` counts the programs whose whole outcome was: line, time and
    nothing beside it included.
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
