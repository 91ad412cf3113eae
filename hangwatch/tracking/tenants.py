"""Whose reports are whose: what arrives with one credential cannot touch what arrived with another.

A *tenant* stands for a credential: the job of a job's token, the user at the other end of the
connection on a server without a token, and the empty text for the server's own token. The server
knows a node agent by its tenant and its id, and looks up each process that a heartbeat mentions
among those that this agent reports. A process passes to another node agent only with an identity
whose job the credential covers, which is how a restarted agent takes its processes over.

Quotas count per family of jobs (`get_family`), whichever credential reports them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TypeVar

from hangwatch.protocol.heartbeat import get_family

T = TypeVar("T")

_SEPARATOR = "\n"  # no name contains it, since names are printable


def qualify_agent(tenant: str, agent: str) -> str:
    """The server's name of a node agent, which no node agent of another tenant has."""
    return f"{tenant}{_SEPARATOR}{agent}" if tenant else agent


def get_tenant(agent: str) -> str:
    """The tenant of a node agent by the server's name of it."""
    return agent.rpartition(_SEPARATOR)[0]


def change_count(counts: Counter[T], key: T, change: int) -> None:
    """Changes one of the counts, and keeps none of 0."""
    counts[key] += change
    if not counts[key]:
        del counts[key]


def take_turns(items: Iterable[T], get_job: Callable[[T], str] = str) -> list[T]:
    """The items in turns of the families of their jobs: the first of each, then the second of each.
    If only the first ones are kept, no family displaces another that has fewer.
    """
    taken: Counter[str] = Counter()
    turns = defaultdict(list)  # the keys ascend: each turn begins after the one before
    for item in items:
        family = get_family(get_job(item))
        turns[taken[family]].append(item)
        taken[family] += 1
    return [item for turn in turns.values() for item in turn]
