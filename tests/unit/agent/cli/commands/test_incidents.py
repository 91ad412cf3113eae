"""The overviews of jobs and incidents."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from hangwatch.agent.cli.commands import incidents
from hangwatch.report.text import TERMINAL_COLUMNS, strip_style

NOW = datetime(2026, 11, 21, 9, 1, tzinfo=timezone.utc)


def make_incident(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name,
        "job": "run7",
        "attempt": 0,
        "kind": "missing_rank",
        "severity": "alert",
        "status": "open",
        "onset_at": "2026-11-21T09:00:48Z",
        "opened_at": "2026-11-21T09:00:50Z",
        "summary": "rank 2 has not entered all_reduce",
    } | changes


JOB_DOCUMENT = {
    "job": "run7",
    "attempt": 0,
    "state": "stalled",
    "world_size": 4,
    "states": {"waiting": 3, "running": 1},
    "open_incidents": 1,
    "last_seen_s": 0.4,
}


def strip_lines(lines: Iterable[str]) -> list[str]:
    return list(map(strip_style, lines))


def test_status_is_a_line_for_each_job_with_its_incidents() -> None:
    text = strip_lines(
        incidents.format_status(
            [JOB_DOCUMENT, JOB_DOCUMENT | {"job": "run8", "state": "running", "step": 12}],
            [make_incident("01JA")],
            NOW,
        )
    )
    assert text == [
        "run7  stalled  4 ranks: 3 waiting, 1 running · seen 0.4 s ago",
        "  ALERT  missing_rank  for 12 s  01JA",
        "    rank 2 has not entered all_reduce",
        "run8  running  4 ranks: 3 waiting, 1 running · step 12 · seen 0.4 s ago",
    ]


def test_status_keeps_incidents_of_earlier_attempts() -> None:
    text = strip_lines(
        incidents.format_status(
            [JOB_DOCUMENT | {"attempt": 1}], [make_incident("01JA", attempt=0)], NOW
        )
    )
    assert text[0].startswith("run7 (attempt 1)")
    assert text[1] == "Still open, of earlier jobs or attempts:"
    assert "01JA" in text[2]


def test_incidents_table_has_typable_ids() -> None:
    ids = ["01JABCDEFGHJKLMNPQRSTVWXYZ", "01JABCDEFGHJKLMNPQRSTVWXY0", "01JZBCDEFGHJKLMNPQRSTVWXYZ"]
    text = strip_lines(
        incidents.format_incidents([make_incident(name, job="j" * 99) for name in ids], NOW)
    )
    assert text[0].split() == ["ID", "STATUS", "AGE", "KIND", "JOB"]
    assert [line.split()[0] for line in text[1::2]] == ids
    assert "10 s" in text[1]
    assert max(map(len, text)) <= TERMINAL_COLUMNS


def test_shortest_unique_id_prefix() -> None:
    assert incidents.find_unique_prefix_width(["01JABCDEFGHJKA", "01JABCDEFGHJKB"]) == 14
    assert incidents.find_unique_prefix_width(["01JABCDEFGHJKA", "02JABCDEFGHJKB"]) == 10
    assert incidents.find_unique_prefix_width(["ab"]) == 2
    assert incidents.find_unique_prefix_width([]) == 10
