"""The unfinished calls in dumps that torch wrote on the bed without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hangwatch.flight_recorder import pickles
from hangwatch.flight_recorder.calls import find_unfinished_calls

DUMPS = Path(__file__).parents[3] / "fakegpu/dumps"


@pytest.mark.parametrize("torch_version", ["torch-2.9.1", "torch-2.14.1"])
def test_call_that_timed_out_comes_first(torch_version: str) -> None:
    data: Any = pickles.safe_loads((DUMPS / torch_version / "stall-timing/rank_0").read_bytes())
    unfinished = [entry for entry in data["entries"] if entry["state"] != "completed"]
    written_ns = unfinished[0]["time_created_ns"] + 3_100_000_000
    calls = find_unfinished_calls(data, written_ns)
    assert [(call.group, call.seq, call.op) for call in calls] == [
        ("0", 6, "all_reduce"),
        ("1", 6, "all_reduce"),
    ]
    assert calls[0].waited_s == pytest.approx(3.1)
    assert (calls[0].timeout_s, calls[0].has_timed_out) == (3.0, True)
    assert calls[0].shapes == ((64,),)
    assert not calls[1].has_timed_out


@pytest.mark.parametrize("data", [None, [], {}, {"entries": 3}])
def test_other_data_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="no list of entries"):
        find_unfinished_calls(data, 0)
