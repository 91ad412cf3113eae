"""Pages of long lists, and the bundle of an incident."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator

import pytest
from starlette.datastructures import URL

from hangwatch.model.ranks import RankState
from hangwatch.server.core.job_views import RankView
from hangwatch.server.core.problems import Problem
from hangwatch.server.http import api
from hangwatch.server.http.api import MAX_MEMBERS_PER_PAGE, PageRequest
from tests.unit.incident_documents import make_incident

LIST_URL = URL("http://h/list?limit=3")


def iter_pages(rows: range, weigh: Callable[[int], int] = lambda row: 0) -> Iterator[list[int]]:
    after = None
    while True:
        request = PageRequest(LIST_URL, 3, after)
        page = json.loads(bytes(request.make_response(rows, str, lambda row: row, weigh).body))
        yield page["items"]
        if page["next"] is None:
            return
        after = page["next"].rpartition("after=")[2].partition("&")[0]


def test_pages_respect_limit_and_lose_nothing() -> None:
    assert list(iter_pages(range(7))) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(iter_pages(range(3))) == [[0, 1, 2]]
    assert list(iter_pages(range(0))) == [[]]


def test_heavy_items_come_in_smaller_nonempty_pages() -> None:
    assert list(iter_pages(range(5), lambda row: MAX_MEMBERS_PER_PAGE // 2)) == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert list(iter_pages(range(2), lambda row: 2 * MAX_MEMBERS_PER_PAGE)) == [[0], [1]]


def test_unknown_cursor_is_reported() -> None:
    with pytest.raises(Problem, match="start again"):
        PageRequest(LIST_URL, 3, "9").make_response(range(3), str, lambda row: row)


def test_a_bundle_holds_the_incident_and_its_stacks() -> None:
    frame = {"function": "step", "file": "train.py", "line": 41, "text": "loss.backward()"}
    stack = {
        "ranks": [1],
        "thread": "MainThread",
        "source": "py-spy",
        "taken_at": "2026-01-01T00:00:00Z",
        "frames": [frame],
    }
    packed = api.build_archive(
        make_incident(stacks=[stack], waits=[{"rank": 0, "for": 1, "group": "0", "seq": 7}]),
        [RankView(job="run7", attempt=0, rank=1, state=RankState.STALLED)],
    )
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert json.loads(archive.read("incident.json"))["waits"][0]["for"] == 1
        assert json.loads(archive.read("ranks.json"))[0]["state"] == "stalled"
        assert (
            "    step (train.py:41)\n        loss.backward()" in archive.read("stacks.txt").decode()
        )
