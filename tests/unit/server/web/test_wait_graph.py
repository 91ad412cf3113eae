"""The drawing of who waits for whom."""

from __future__ import annotations

from hangwatch.model.kinds import VerdictKind
from hangwatch.server.web.wait_graph import draw_graph
from tests.unit.incident_documents import make_incident


def test_graph_counts_omitted_waits_and_separates_arrows() -> None:
    calls = [{"ranks": list(range(1, 500)), "seq": 7, "op": "all_reduce"}]
    kept = [{"rank": r, "for": 0, "group": "0", "seq": 7} for r in range(1, 65)]
    many = make_incident(
        culprits=[0],
        waiting=list(range(1, 500)),
        waits=kept,
        calls=calls,
        seq=7,
        group={"name": "0", "desc": "", "ranks": []},
    )
    boxes = draw_graph(many, {}).boxes
    assert [(len(box.ranks), box.is_culprit) for box in boxes] == [(1, True), (499, False)]
    cycle = [
        {"rank": 0, "for": 1, "group": "1", "seq": 6},
        {"rank": 1, "for": 0, "group": "2", "seq": 6},
    ]
    drawn = draw_graph(
        make_incident(kind=VerdictKind.DEADLOCK, culprits=[0, 1], waiting=[], waits=cycle), {}
    )
    assert [(arrow.waiter, arrow.anchor) for arrow in drawn.arrows] == [(0, "end"), (1, "start")]


def test_rank_that_is_awaited_and_waits_for_the_culprit_has_one_box() -> None:
    calls = [{"ranks": [1, 2, 3], "seq": 7, "op": "all_reduce"}]
    waits = [{"rank": 1, "for": 2, "group": "1", "seq": 6}]
    incident = make_incident(culprits=[0], waiting=[1, 2, 3], waits=waits, calls=calls, seq=7)
    assert [box.ranks for box in draw_graph(incident, {}).boxes] == [(0,), (2, 3), (1,)]
