"""How good the verdicts are: precision, recall and seconds to verdict, from what the programs had
to give and gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from tests.harness.expected import Expected
from tests.harness.verdicts import Outcome


@dataclass(slots=True, kw_only=True)
class Score:
    """Of one kind: the programs that had to give it, those that did with the right culprits, and
    all verdicts of it.
    """

    kind: str
    programs: int = 0
    right: int = 0
    claimed: int = 0
    as_expected: int = 0  # in time, with the planted line, and alone
    seconds: list[float] = field(default_factory=list)

    @property
    def precision(self) -> float | None:
        """Of the verdicts of this kind, the part that was right; None where there was none."""
        return self.right / self.claimed if self.claimed else None

    @property
    def recall(self) -> float | None:
        """Of the programs of this kind, the part that got it; None where there was none."""
        return self.right / self.programs if self.programs else None


def score(runs: Iterable[tuple[Expected, Outcome]]) -> list[Score]:
    """By kind, in the order of the alphabet, and ``all`` last. A verdict on a healthy job is one
    that is not right.
    """
    kinds: dict[str, Score] = {}
    every = Score(kind="all")
    for expected, outcome in runs:
        wanted = (
            kinds.setdefault(expected.kind, Score(kind=expected.kind))
            if not expected.healthy
            else None
        )
        for row in (wanted, every) if wanted is not None else ():
            row.programs += 1
            row.as_expected += outcome.ok
            if outcome.seconds is not None:
                row.seconds.append(outcome.seconds)
        named = False
        for kind, culprits in _claims(expected, outcome):
            told = kinds.setdefault(kind, Score(kind=kind))
            hit = (
                not expected.healthy
                and not named
                and (kind, culprits) == (expected.kind, expected.culprits)
            )
            named |= hit
            for row in (told, every):
                row.claimed += 1
                row.right += hit
    return [*(kinds[kind] for kind in sorted(kinds)), every]


def _claims(expected: Expected, outcome: Outcome) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The alerts; of warnings those of a kind that a program is about, as others are no claim that
    something hangs.
    """
    for incident in outcome.incidents:
        if incident["severity"] == "alert" or (
            expected.severity == "warning" and incident["kind"] == expected.kind
        ):
            yield incident["kind"], tuple(sorted(incident["culprits"]))


def table(rows: Iterable[Score]) -> Iterator[str]:
    """Its lines. ``as expected`` counts the programs whose whole outcome was: line, time and
    nothing beside it included.
    """
    yield f"{'kind':<16} {'programs':>8} {'as expected':>11} {'precision':>9} {'recall':>7} {'median s':>8} {'slowest s':>9}"
    for row in rows:
        middle, last = (
            (f"{median(row.seconds):.1f}", f"{max(row.seconds):.1f}") if row.seconds else ("", "")
        )
        shares = f"{_percent(row.precision):>9} {_percent(row.recall):>7}"
        yield f"{row.kind:<16} {row.programs:>8} {row.as_expected:>11} {shares} {middle:>8} {last:>9}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
