"""A verdict as text: what comes first, what is marked, and that a job's own text cannot drive the
terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from hangwatch.model.kernels import Kernel
from hangwatch.report import terminal
from hangwatch.report import text as words
from hangwatch.report.terminal import (
    describe_incident_kernels,
    describe_kernels,
    format_devices,
    format_stack,
    merge_equal_stacks,
)
from hangwatch.stacks.frames import is_library

NOW = datetime(2026, 11, 21, 9, 1, tzinfo=timezone.utc)
THREADING = "/usr/lib/python3.11/threading.py"


def make_frame(function: str, file: str, line: int = 1) -> dict[str, Any]:
    return {"function": function, "file": file, "line": line}


OWN_CODE_FRAMES = [make_frame("wait", THREADING, 331), make_frame("step", "train.py", 57)]


def make_incident(**changes: Any) -> dict[str, Any]:
    return {
        "id": "01JAAAAAAAAAAAAAAAAAAAAAAA",
        "job": "run7",
        "attempt": 0,
        "kind": "mismatch",
        "severity": "alert",
        "status": "open",
        "onset_at": "2026-11-21T09:00:00.500000Z",
        "opened_at": "2026-11-21T09:00:01Z",
        "resolved_at": None,
        "summary": (
            "rank 1 called broadcast where ranks 0, 2-3 called all_reduce (call 7 of group"
            " default_pg)"
        ),
        "advice": "Look at what makes rank 1 take another branch.",
        "culprits": [1],
        "waiting": [0, 2, 3],
        "group": {"name": "0", "desc": "default_pg", "ranks": [0, 1, 2, 3]},
        "seq": 7,
        "fields": ["op"],
        "calls": [
            {
                "ranks": [0, 2, 3],
                "op": "all_reduce",
                "shapes": [[64]],
                "dtype": "float32",
                "reduce_op": "sum",
                "site": make_site(41),
            },
            {
                "ranks": [1],
                "op": "broadcast",
                "shapes": [[64]],
                "dtype": "float32",
                "root": 0,
                "site": make_site(57),
            },
        ],
        "waits": [{"rank": r, "for": 1, "group": "0", "seq": 7} for r in (0, 2, 3)],
        "processes": [
            {
                "rank": 1,
                "pid": 4712,
                "state": "S",
                "exit_status": None,
                "signal": None,
                "exception": None,
            }
        ],
        "stacks": [
            {"ranks": [1], "thread": "MainThread", "source": "py-spy", "frames": OWN_CODE_FRAMES},
            {
                "ranks": [0, 2, 3],
                "source": "py-spy",
                "error": "py-spy may not attach: add the capability SYS_PTRACE",
                "frames": [],
            },
        ],
    } | changes


def make_site(line: int) -> dict[str, Any]:
    return {"file": "/home/me/train.py", "line": line, "function": "step"}


def render_lines(incident: dict[str, Any], **how: Any) -> list[str]:
    return strip_lines(terminal.format_incident(incident, NOW, **how))


def format_calls(incident: dict[str, Any]) -> list[str]:
    return strip_lines(terminal.format_calls(incident))


def format_processes(incident: dict[str, Any]) -> list[str]:
    return strip_lines(terminal.format_processes(incident))


def strip_lines(lines: Iterable[str]) -> list[str]:
    """The lines as a file or a pipe gets them."""
    return list(map(words.strip_style, lines))


def test_verdict_comes_first_then_advice() -> None:
    text = render_lines(make_incident())
    assert text[0] == "ALERT  mismatch · job run7 · open for 60 s  01JAAAAAAAAAAAAAAAAAAAAAAA"
    assert " ".join(text[1:3]).startswith(
        "rank 1 called broadcast where ranks 0, 2-3 called all_reduce"
    )
    assert text.index("Look at what makes rank 1 take another branch.") < text.index(
        "Call 7 of group default_pg"
    )


def test_only_the_differing_row_is_marked() -> None:
    text = format_calls(make_incident())
    assert text[1].split() == ["ranks", "0,", "2-3", "rank", "1"]
    assert [line.split()[:4] for line in text if line.startswith("≠")] == [
        ["≠", "op", "all_reduce", "broadcast"]
    ]
    assert any(line.split() == ["root", "-", "0"] for line in text)
    assert any(
        line.split() == ["at", "/home/me/train.py:41", "/home/me/train.py:57"] for line in text
    )


@pytest.mark.parametrize("field", ["op", "shape", "dtype", "reduce_op", "root", "splits"])
def test_each_mismatch_field_has_a_row(field: str) -> None:
    calls = [
        {
            "ranks": [0],
            "op": "a",
            "shapes": [[2, 3]],
            "dtype": "float32",
            "reduce_op": "sum",
            "root": 0,
            "splits": [[1, 2], [3, 4]],
        },
        {
            "ranks": [1],
            "op": "b",
            "shapes": [[3, 2]],
            "dtype": "int64",
            "reduce_op": "max",
            "root": 1,
            "splits": [[2, 1], [4, 3]],
        },
    ]
    marked = [
        line.split()[1]
        for line in format_calls(make_incident(fields=[field], calls=calls))
        if line.startswith("≠")
    ]
    assert marked == [field]


def test_root_is_shown_as_global_rank() -> None:
    calls = [
        {"ranks": [4], "op": "broadcast", "root": 1},
        {"ranks": [3, 5], "op": "broadcast", "root": 0},
    ]
    text = format_calls(
        make_incident(calls=calls, group={"name": "7", "desc": "tp", "ranks": [3, 4, 5]})
    )
    assert any(line.split() == ["root", "4", "3"] for line in text)


def test_the_number_of_a_call_of_a_channel_is_not_shown_as_one_of_the_group() -> None:
    calls = [{"ranks": [0], "op": "send", "peer": 1}, {"ranks": [1], "op": "recv", "peer": 0}]
    assert format_calls(make_incident(calls=calls))[0] == "Calls of group default_pg"


def test_many_call_classes_stay_within_width() -> None:
    calls = [{"ranks": [r], "op": f"operator_{r}", "shapes": [[r] * 30]} for r in range(7)]
    text = format_calls(make_incident(calls=calls))
    assert all(f"operator_{r}" in "\n".join(text) for r in range(7))
    assert max(map(len, text)) <= words.TERMINAL_COLUMNS


def test_user_frames_are_highlighted() -> None:
    text = list(format_stack(make_incident()["stacks"][0]))
    assert text[1].startswith("\x1b[2m    wait")
    assert "threading.py:331" in text[1]
    assert text[2].startswith("\x1b[1m  > step")
    assert "train.py:57" in text[2]


def test_frame_text_is_shown_if_known() -> None:
    stack = {
        "ranks": [1],
        "source": "py-spy",
        "frames": [make_frame("step", "train.py", 57) | {"text": "  batch = queue.get()"}],
    }
    assert list(format_stack(stack))[-1] == "      batch = queue.get()"


def test_long_runs_of_library_frames_are_folded_without_full() -> None:
    deep = [
        make_frame(f"f{i}", "/opt/lib/python3.10/site-packages/torch/x.py", i) for i in range(9)
    ]
    incident = make_incident(
        stacks=[
            {"ranks": [1], "source": "py-spy", "frames": [*deep, make_frame("main", "train.py", 3)]}
        ]
    )
    folded, whole = "\n".join(render_lines(incident)), "\n".join(render_lines(incident, full=True))
    assert "8 more frames of libraries" in folded
    assert "f8" not in folded
    assert "> main" in folded
    assert "f8" in whole
    assert "more frames" not in whole
    assert "torch/x.py:8" in whole


@pytest.mark.parametrize(
    "file",
    [
        "/opt/venv/lib/python3.10/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/yaml/__init__.py",
        "/usr/lib/python3.12/threading.py",
        "/root/src/pytorch/torch/distributed/distributed_c10d.py",
        "/root/src/hangwatch/agent/recorder/kernels.py",
        "/root/src/hangwatch/agent/recorder/checks/tensors.py",
        "<frozen runpy>",
        "libtorch_cpu.so",
        "libc.so.6",
        "/root/.pyenv/versions/3.11.7/lib/libpython3.11.so.1.0",
        "",
    ],
)
def test_library_files(file: str) -> None:
    assert is_library(file)


@pytest.mark.parametrize(
    "file",
    [
        "train.py", "/home/me/torchtitan/train.py", "/data/lib/loader.py", "<string>", "/home/me/model.py",
        "/home/me/agent/recorder/replay.py", "/home/me/agent/recorder.py", "/home/me/recorder/setup.py", "/home/me/agent/train.py",
    ],
)  # fmt: skip
def test_files_of_the_user(file: str) -> None:
    assert not is_library(file)


def test_threads_only_in_libraries_are_omitted_without_full() -> None:
    pool = {
        "ranks": [1],
        "thread": "pin_memory",
        "source": "py-spy",
        "frames": [make_frame("get", THREADING)],
    }
    incident = make_incident(stacks=[*make_incident()["stacks"][:1], pool])
    assert "… and 1 more in libraries only: see `hangwatch show --full`" in render_lines(incident)
    assert not any("pin_memory" in line for line in render_lines(incident))
    assert any("pin_memory" in line for line in render_lines(incident, full=True))


def test_failed_dumps_show_their_remedy_and_waits_are_merged() -> None:
    text = render_lines(make_incident())
    assert "ranks 0, 2-3 · waiting · py-spy" in text
    assert "  ! py-spy may not attach: add the capability SYS_PTRACE" in text
    assert "ranks 0, 2-3 wait for rank 1 in call 7 of group default_pg" in text


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        ({"signal": 9}, "ended by SIGKILL"),
        ({"signal": 40}, "ended by signal 40"),
        ({"exit_status": 3}, "exited with status 3"),
        ({"state": "T"}, "is stopped (state T)"),
        ({"state": "?"}, "is in an unknown state"),
    ],
)
def test_process_state_text(process: dict[str, Any], expected: str) -> None:
    assert format_processes({"processes": [{"rank": 1, "pid": 7, "host": "node1"} | process]}) == [
        f"rank 1: process 7 on node1 {expected}"
    ]


def test_exception_is_shown_with_location() -> None:
    raised = {"type": "ValueError", "message": "bad\nbatch", "site": make_site(9)}
    text = format_processes(
        {"processes": [{"rank": 1, "pid": 7, "exit_status": 1, "exception": raised}]}
    )
    assert text[1:] == ["  ValueError: bad batch", "  at /home/me/train.py:9 in step"]


HOSTILE_TEXT = "x\x1b[2J\x1b]0;title\x07\r\x08\u202e\x9b31m\x00y"


def test_clean_keeps_only_printable_text() -> None:
    assert words.clean_text(HOSTILE_TEXT) == "x y"
    assert words.clean_text("a\nb\tc") == "a b c"
    assert words.clean_text("größe 模型") == "größe 模型"
    assert words.clean_text("end\x1b]0;unfinished") == "end"


def test_job_text_is_sanitized() -> None:
    bad_site = {"file": HOSTILE_TEXT, "line": 1, "function": HOSTILE_TEXT}
    bad = make_incident(
        **dict.fromkeys(
            ("id", "job", "attempt", "kind", "severity", "status", "summary", "advice"),
            HOSTILE_TEXT,
        ),
        site=bad_site,
        group={"name": HOSTILE_TEXT, "desc": HOSTILE_TEXT, "ranks": [0]},
        calls=[
            {
                "ranks": [0],
                "op": HOSTILE_TEXT,
                "dtype": HOSTILE_TEXT,
                "detail": HOSTILE_TEXT,
                "shapes": [[HOSTILE_TEXT]],
                "site": bad_site,
            }
        ],
        waits=[{"rank": 0, "for": 1, "group": HOSTILE_TEXT, "seq": 1}],
        processes=[
            {
                "rank": 0,
                "host": HOSTILE_TEXT,
                "state": HOSTILE_TEXT,
                "exception": {"type": HOSTILE_TEXT, "message": HOSTILE_TEXT, "site": bad_site},
            }
        ],
        stacks=[
            {
                "ranks": [0],
                "thread": HOSTILE_TEXT,
                "source": HOSTILE_TEXT,
                "error": HOSTILE_TEXT,
                "frames": [bad_site],
            }
        ],
    )
    text = render_lines(bad, full=True)
    assert text
    assert all(line.isprintable() for line in text)


def test_empty_document_is_no_error() -> None:
    assert render_lines({}) == ["ALERT  ? · job ? · open"]
    nulls: dict[str, Any] = dict.fromkeys(make_incident())
    assert render_lines(nulls) == render_lines({}), "null is read as if it were missing"


RESOLVED_FIELDS = {"status": "resolved", "resolved_at": "2026-11-21T09:00:40Z"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"summary": "word " * 60, "advice": "x" * 200}, {"job": "j" * 99}, RESOLVED_FIELDS],
)
def test_lines_fit_into_80_columns(changes: dict[str, Any]) -> None:
    deep = [make_frame("a_function_with_quite_a_long_name_indeed", "/very" * 40 + "/train.py", 12)]
    text = render_lines(
        make_incident(stacks=[{"ranks": [1], "source": "py-spy", "frames": deep}], **changes)
    )
    assert max(map(len, text)) <= words.TERMINAL_COLUMNS
    assert any("/train.py:12" in line for line in text)


def test_resolved_incident_shows_duration() -> None:
    incident = make_incident(
        status="resolved", onset_at=make_timestamp(100), resolved_at=make_timestamp(40)
    )
    assert render_lines(incident)[:2] == [
        "ALERT  mismatch · job run7 · resolved, began 100 s ago, lasted 60 s",
        "01JAAAAAAAAAAAAAAAAAAAAAAA",
    ]


def make_timestamp(seconds_ago: float) -> str:
    return (NOW - timedelta(seconds=seconds_ago)).isoformat().replace("+00:00", "Z")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0.0 s"),
        (0.42, "0.4 s"),
        (12, "12 s"),
        (75, "75 s"),
        (600, "10 min"),
        (4000, "67 min"),
        (9e6, "104 d"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert words.format_age(seconds) == text


def test_missing_time_has_no_age() -> None:
    assert words.seconds_since(None, NOW) is None
    assert words.seconds_since("yesterday", NOW) is None
    assert words.seconds_since("2026-11-21T09:00:00", NOW) is None


def test_only_equal_stacks_merge() -> None:
    same = [make_frame("wait", THREADING)]
    entries = [
        {"ranks": [3], "thread": "MainThread", "source": "py-spy", "frames": same},
        {
            "ranks": [1],
            "thread": "MainThread",
            "source": "py-spy",
            "frames": [make_frame("load", "train.py")],
        },
        {"ranks": [0], "thread": "MainThread", "source": "py-spy", "frames": same},
    ]
    assert [entry["ranks"] for entry in merge_equal_stacks(entries)] == [[0, 3], [1]]


def test_rows_of_a_table_end_without_blanks() -> None:
    text = format_calls(make_incident())
    assert [line.rstrip() for line in text] == text


def test_devices_in_the_same_position_share_a_line() -> None:
    positions = [
        {"rank": rank, "group": "0", "enqueued": 6, "started": started, "completed": 5}
        for rank, started in ((0, 6), (1, 5), (2, 6))
    ]
    group = {"name": "0", "desc": "default_pg"}
    lines = list(format_devices({"group": group, "device": positions}))
    assert " ".join(lines) == (
        "rank 1: the device has begun 5 and completed 5 of 6 queued collectives of group default_pg"
        " ranks 0, 2: the device has begun 6 and completed 5 of 6 queued collectives of group"
        " default_pg"
    )
    assert list(format_devices({})) == []


def test_kernels_are_shown_for_all_ranks_that_run_the_same() -> None:
    nccl = {"name": "ncclDevKernel_AllReduce", "grid": [4, 1, 1], "block": [512, 1, 1]}
    own = {"name": "spin\x1b[2J", "grid": [2, 3, 1], "block": [16, 8, 1]}
    moment = {"source": "cuda-gdb", "taken_at": "2026-01-01T00:00:00Z"}
    kernels = [{"rank": rank, "kernels": [nccl], **moment} for rank in (0, 1, 2)]
    kernels.append({"rank": 3, "kernels": [own], **moment})
    kernels.append({"rank": 4, "kernels": [], **moment})
    kernels.append({"rank": 5, "error": "cuda-gdb is not installed", **moment})
    assert list(describe_incident_kernels({"kernels": kernels})) == [
        "rank 3's device runs spin (6 x 128 threads) (cuda-gdb)",
        "rank 4's device runs no kernel (cuda-gdb)",
        "the devices of ranks 0-2 run ncclDevKernel_AllReduce (4 x 512 threads) (cuda-gdb)",
        "the kernels of rank 5 are not known: cuda-gdb is not installed",
    ]
    assert list(describe_incident_kernels({})) == []


def test_many_different_kernels_are_abbreviated() -> None:
    kernels = {
        rank: tuple(Kernel(name=f"k{number}") for number in range(rank, rank + 6))
        for rank in range(9)
    }
    text = describe_kernels(kernels)
    assert text.startswith("rank 0's device runs k0 (1 x 1 threads), k1 (1 x 1 threads)")
    assert "and 3 more" in text and text.endswith("; the other devices run others")
