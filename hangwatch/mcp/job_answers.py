"""Jobs, their ranks, and how their calls perform."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from hangwatch.report.text import group_name

from .answers import Document, drop_empty
from .quoting import Answer, SentenceQuoter, quote_text, shorten_ranks

_MAX_GROUPS = 8
_MAX_CALLS = 5
_MAX_LATE = 3
_MAX_PHASES = 8


def describe_job(job: Document) -> Answer:
    """One of `GET /api/v1/jobs`."""
    quoter = SentenceQuoter(job)
    states = {str(state): count for state, count in (job.get("states") or {}).items() if count}
    return drop_empty(
        {
            "job": quote_text(job.get("job", "?")),
            "attempt": job.get("attempt"),
            "state": job.get("state"),
            "summary": quoter.replace_quotes(job.get("summary", "")),
            "ranks": job.get("world_size"),
            "ranks_by_state": states,
            "hosts": len(job.get("hosts") or []),
            "open_incidents": job.get("open_incidents"),
            "step": job.get("step"),
            "steps_per_s": job.get("steps_per_s"),
            "last_seen_s": job.get("last_seen_s"),
            "quotes": quoter.list_quotes(),
        }
    )


def describe_ranks(ranks: Iterable[Document]) -> Answer:
    """Ranks by state, and those of each state that is not usual."""
    by_state: dict[str, list[Document]] = {}
    for rank in ranks:
        by_state.setdefault(str(rank.get("state")), []).append(rank)
    return {
        "ranks": [
            drop_empty(
                {
                    "state": state,
                    "ranks": shorten_ranks(r.get("rank", -1) for r in found),
                    "count": len(found),
                    "longest_wait_s": max((r.get("waiting_s") or 0.0 for r in found), default=0.0),
                    "phases": [
                        quote_text(p) for p in sorted({r["phase"] for r in found if r.get("phase")})
                    ][:_MAX_PHASES],
                }
            )
            for state, found in sorted(by_state.items())
        ]
    }


def describe_performance(groups: Iterable[Document]) -> Answer:
    """Process groups, those that wait longest for a straggler first. Durations are in seconds."""
    return {"groups": [_describe_group(group) for group in islice(groups, _MAX_GROUPS)]}


def _describe_group(document: Document) -> Answer:
    quoter = SentenceQuoter(document)
    group = document.get("group") or {}
    straggler = document.get("straggler") or {}
    arrivals = document.get("arrivals") or {}
    answer = {
        "job": quote_text(document.get("job", "?")),
        "group": quote_text(group_name(group.get("name", "?"), group.get("desc"))),
        "ranks": shorten_ranks(group.get("ranks") or []),
        "straggler": quoter.replace_quotes(straggler.get("summary", "")),
        "calls": [_describe_calls(call) for call in (document.get("calls") or [])[:_MAX_CALLS]],
        "last_to_arrive": [
            {
                "ranks": shorten_ranks(late.get("ranks") or []),
                "share": late.get("share"),
                "lag_s": late.get("lag_s"),
            }
            for late in (arrivals.get("last") or [])[:_MAX_LATE]
        ],
        "quotes": quoter.list_quotes(),
    }
    return drop_empty(answer)


def _describe_calls(calls: Document) -> Answer:
    latency: dict[str, Any] = calls.get("latency") or {}
    wait: dict[str, Any] = calls.get("wait") or {}
    return drop_empty(
        {
            "op": quote_text(calls.get("op", "?")),
            "size_from_bytes": calls.get("size_from"),
            "calls": calls.get("calls"),
            "latency_p50_s": latency.get("p50_s"),
            "latency_p95_s": latency.get("p95_s"),
            "wait_p50_s": wait.get("p50_s"),
            "busbw_gbs": calls.get("busbw_gbs"),
        }
    )
