"""When ranks that hang are ended so that their launcher restarts them, and which: a pure function.
`aborter` carries it out.

To end what would have gone on by itself is worse than to wait: whatever is not certain here means
to wait.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import KINDS, Abort, Role, Severity, VerdictKind, select_kinds
from hangwatch.protocol import heartbeat
from hangwatch.report.text import name_ranks
from hangwatch.tracking.attempt import Attempt

from ..incidents.records import AlertSummary

# Those that do not heal by themselves, as far as can be told. Not among them: a rank that is
# stopped may be under a debugger or suspended, and be continued; ranks that have not come yet may
# come; a node that is not heard may be heard again.
DEFAULT_KINDS = select_kinds(lambda spec: spec.abort is Abort.BY_DEFAULT)
POSSIBLE_KINDS = (*DEFAULT_KINDS, *select_kinds(lambda spec: spec.abort is Abort.ON_REQUEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an operator chose. ``after`` in seconds, ``limit`` for one job over all its attempts."""

    kinds: frozenset[VerdictKind] = frozenset(DEFAULT_KINDS)
    limit: int = 3
    after: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What is known of one rank of the attempt. Times are the monotonic clock's."""

    alive: bool = True
    heard_at: float
    moved_at: float  # when it last made a call, or one was seen to be complete
    inside: bool = False  # in a call that is not complete
    on_hang: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """An open incident, and all that matters to whether ranks are ended for it."""

    incident: Incident
    standing: AlertSummary | None  # at the last diagnosis
    members: Mapping[int, Member]
    stored: bool  # the evidence is complete and written, and people are told
    history: int = 0  # earlier incidents of this job for which ranks were ended
    planned_at: float | None = None  # since when it counts as an alert for which ranks may be ended
    aborted_at: float = float(
        "-inf"
    )  # when ranks of this attempt were last ended: its launcher may be at work since
    fresh: float  # seconds: what is older than that is no news


class Step(enum.Enum):
    NOTHING = "nothing"  # the rules do not concern it, or nobody hangs
    WITHHOLD = "withhold"  # they do, but it must not be
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``ranks`` are those to be ended, now or from ``due_at`` on; all of the job that can be
    reached where ``whole`` is true.
    """

    step: Step
    ranks: tuple[int, ...] = ()
    whole: bool = False
    due_at: float = 0.0
    why: str = ""


_NOTHING = Decision(step=Step.NOTHING)


def decide(facts: Facts, rules: Rules, now: float) -> Decision:
    """What is to be done about an incident at time ``now``."""
    incident, standing = facts.incident, facts.standing
    if (
        incident.status != "open"
        or incident.severity is not Severity.ALERT
        or incident.kind not in rules.kinds
    ):
        return _NOTHING
    if standing is None or now - standing.at > facts.fresh:
        return _NOTHING
    held_up = {r for r in standing.waiting if r in facts.members and facts.members[r].alive}
    ranks, whole = _aim(facts, standing)
    if not ranks or not (held_up or _stuck_themselves(facts, ranks)):
        return _NOTHING
    concerned = [facts.members[r] for r in {*ranks, *held_up}]
    since = now if facts.planned_at is None else facts.planned_at
    due_at = max(since, facts.aborted_at, *(m.moved_at for m in concerned)) + rules.after
    found = Decision(step=Step.WAIT, ranks=ranks, whole=whole, due_at=due_at)
    if why := _veto(facts, rules):
        return Decision(step=Step.WITHHOLD, ranks=ranks, whole=whole, why=why)
    heard = all(now - m.heard_at <= facts.fresh for m in concerned)
    if facts.planned_at is None or now < due_at or not heard or not facts.stored:
        return found
    return Decision(step=Step.END, ranks=ranks, whole=whole, due_at=due_at)


def _aim(facts: Facts, standing: AlertSummary) -> tuple[tuple[int, ...], bool]:
    """The culprits, as long as they are; or, where none is named or there is none left to end,
    whoever of the job can be.
    """
    known = facts.incident.recovery
    failed = (
        {end.rank for end in known.ends if end.result == "failed"} if known is not None else set()
    )
    unreachable = (
        set(facts.incident.culprits) if KINDS[facts.incident.kind].is_unreachable else set()
    )
    left = {rank for rank, m in facts.members.items() if m.alive} - failed - unreachable
    culprits = left & set(facts.incident.culprits)
    return tuple(sorted(culprits & standing.accused if culprits else left)), not culprits


def _stuck_themselves(facts: Facts, ranks: tuple[int, ...]) -> bool:
    """Nobody but the culprits hangs: those on a cycle, and those of a mismatch in which nobody is
    the odd one out.
    """
    spec = KINDS[facts.incident.kind]
    return spec.blocks_culprits or (
        spec.role is Role.ROOT and all(facts.members[rank].inside for rank in ranks)
    )


def _veto(facts: Facts, rules: Rules) -> str:
    refusing = [
        rank for rank, m in facts.members.items() if m.alive and heartbeat.refuses_abort(m.on_hang)
    ]
    if refusing:
        return (
            f"HANGWATCH_ON_HANG={facts.members[refusing[0]].on_hang} in the environment of"
            f" {name_ranks(refusing)} refuses it"
        )
    if facts.history >= rules.limit:
        times = "once" if facts.history == 1 else f"{facts.history} times"
        return (
            f"ranks of job {facts.incident.job} were ended {times} since it last ended well, as"
            " often as --abort-limit allows: raise that, or give each run a name of its own with"
            " HANGWATCH_JOB"
        )
    return ""


def members(attempt: Attempt) -> dict[int, Member]:
    return {
        rank: Member(
            alive=p.is_alive, heard_at=p.last_seen_at, moved_at=p.last_advanced_at, on_hang=p.identity.on_hang,
            inside=any(s.is_pending for s in p.streams.values()),
        )
        for rank, p in attempt.processes.items()
    }  # fmt: skip


def parse_kinds(names: Sequence[str]) -> tuple[VerdictKind, ...]:
    """Raises ValueError for a kind for which nothing is ever ended."""
    known = {kind.value: kind for kind in POSSIBLE_KINDS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cannot have {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return tuple(known[name] for name in names)
