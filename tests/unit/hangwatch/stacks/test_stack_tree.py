"""Stacks of many ranks as one tree, and as files for other tools."""

from __future__ import annotations

from hangwatch.model.ranks import Frame
from hangwatch.stacks.profile import make_speedscope_document
from hangwatch.stacks.trees import format_folded_stacks, merge_stacks

MAIN_FRAME = Frame(function="main", file="/u/train.py", line=9)
STEP_FRAME = Frame(function="step", file="/u/train.py", line=4)
LOAD_FRAME = Frame(function="load", file="/u/data.py", line=2)
WAIT_FRAME = Frame(function="wait", file="/usr/lib/python3.11/threading.py", line=3)
REDUCE_FRAME = Frame(
    function="all_reduce",
    file="/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    line=1,
)


def test_stacks_branch_where_they_differ() -> None:
    [top] = merge_stacks(
        [
            ([0, 1, 3], [REDUCE_FRAME, STEP_FRAME, MAIN_FRAME]),
            ([2], [WAIT_FRAME, LOAD_FRAME, STEP_FRAME, MAIN_FRAME]),
        ]
    )
    assert (top.frames, top.ranks) == ((MAIN_FRAME, STEP_FRAME), (0, 1, 2, 3))
    odd, rest = top.branches
    assert (odd.frames, odd.ranks, odd.branches) == ((LOAD_FRAME, WAIT_FRAME), (2,), ())
    assert (rest.frames, rest.ranks) == ((REDUCE_FRAME,), (0, 1, 3))


def test_rank_in_outer_frame_splits_run_of_frames() -> None:
    [top] = merge_stacks(
        [([0], [STEP_FRAME, MAIN_FRAME]), ([1], [LOAD_FRAME, STEP_FRAME, MAIN_FRAME])]
    )
    assert (top.frames, top.ranks) == ((MAIN_FRAME, STEP_FRAME), (0, 1))
    assert [(b.frames, b.ranks) for b in top.branches] == [((LOAD_FRAME,), (1,))]


def test_user_frames_are_distinguished_from_library_frames() -> None:
    [top] = merge_stacks([([2], [WAIT_FRAME, LOAD_FRAME, STEP_FRAME, MAIN_FRAME])])
    assert list(top.iter_frame_runs()) == [
        (True, (MAIN_FRAME, STEP_FRAME, LOAD_FRAME)),
        (False, (WAIT_FRAME,)),
    ]
    assert merge_stacks([]) == ()


def test_folded_stacks_count_ranks_and_keep_their_separators() -> None:
    """SECURITY.md: "or a file of stacks"."""
    odd = Frame(function="a;b\nc", file="x.py", line=1)
    assert list(format_folded_stacks([([0, 1], [odd, MAIN_FRAME])])) == [
        "main (/u/train.py:9);a:b c (x.py:1) 2"
    ]


def test_speedscope_has_a_profile_for_each_stack_over_shared_frames() -> None:
    profiles = [
        ("rank 2", [([MAIN_FRAME, LOAD_FRAME], 1)]),
        ("ranks 0-1", [([MAIN_FRAME, STEP_FRAME], 1)]),
    ]
    made = make_speedscope_document("run7", profiles, "none", rate=1)
    assert [p["samples"] for p in made["profiles"]] == [[[0, 1]], [[0, 2]]]  # type: ignore[attr-defined]
    assert made["shared"] == {
        "frames": [
            {"name": "main", "file": "/u/train.py", "line": 9},
            {"name": "load", "file": "/u/data.py", "line": 2},
            {"name": "step", "file": "/u/train.py", "line": 4},
        ]
    }


def test_speedscope_has_no_line_that_is_not_known() -> None:
    unknown = Frame(function="<module>", file="<string>", line=0)
    made = make_speedscope_document("run7", [("rank 0", [([unknown], 1)])], "none", rate=1)
    assert made["shared"] == {"frames": [{"name": "<module>", "file": "<string>"}]}
