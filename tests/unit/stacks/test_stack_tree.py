"""Stacks of many ranks as one tree, and as files for other tools."""

from __future__ import annotations

from hangwatch.model.threads import Frame
from hangwatch.stacks.stack_tree import format_folded_stacks, merge_stacks, stacks_to_speedscope

MAIN = Frame(function="main", file="/u/train.py", line=9)
STEP = Frame(function="step", file="/u/train.py", line=4)
LOAD = Frame(function="load", file="/u/data.py", line=2)
WAIT = Frame(function="wait", file="/usr/lib/python3.11/threading.py", line=3)
REDUCE = Frame(
    function="all_reduce",
    file="/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    line=1,
)


def test_stacks_part_where_they_differ_and_each_branch_knows_its_ranks() -> None:
    [top] = merge_stacks([([0, 1, 3], [REDUCE, STEP, MAIN]), ([2], [WAIT, LOAD, STEP, MAIN])])
    assert (top.frames, top.ranks) == ((MAIN, STEP), (0, 1, 2, 3))
    odd, rest = top.branches
    assert (odd.frames, odd.ranks, odd.branches) == ((LOAD, WAIT), (2,), ())
    assert (rest.frames, rest.ranks) == ((REDUCE,), (0, 1, 3))


def test_a_rank_that_stands_further_out_ends_a_run_of_frames() -> None:
    [top] = merge_stacks([([0], [STEP, MAIN]), ([1], [LOAD, STEP, MAIN])])
    assert (top.frames, top.ranks) == ((MAIN, STEP), (0, 1))
    assert [(b.frames, b.ranks) for b in top.branches] == [((LOAD,), (1,))]


def test_the_users_frames_are_told_from_libraries() -> None:
    [top] = merge_stacks([([2], [WAIT, LOAD, STEP, MAIN])])
    assert list(top.iter_frame_runs()) == [(True, (MAIN, STEP, LOAD)), (False, (WAIT,))]
    assert merge_stacks([]) == ()


def test_folded_stacks_count_ranks_and_keep_their_separators() -> None:
    odd = Frame(function="a;b\nc", file="x.py", line=1)
    assert list(format_folded_stacks([([0, 1], [odd, MAIN])])) == [
        "main (/u/train.py:9);a:b c (x.py:1) 2"
    ]


def test_speedscope_has_a_profile_for_each_stack_over_shared_frames() -> None:
    made = stacks_to_speedscope("run7", [("rank 2", [LOAD, MAIN]), ("ranks 0-1", [STEP, MAIN])])
    assert [p["samples"] for p in made["profiles"]] == [[[0, 1]], [[0, 2]]]  # type: ignore[attr-defined]
    assert made["shared"] == {
        "frames": [
            {"name": "main", "file": "/u/train.py", "line": 9},
            {"name": "load", "file": "/u/data.py", "line": 2},
            {"name": "step", "file": "/u/train.py", "line": 4},
        ]
    }
