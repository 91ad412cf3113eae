"""Profiles of py-spy's samples: read, packed, folded, drawn."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from hangwatch.agent.cli.commands.record import format_recording
from hangwatch.model.ranks import Frame
from hangwatch.report.text import strip_style
from hangwatch.server.http import ondemand_routes, rendering
from hangwatch.server.ondemand import recordings
from hangwatch.stacks.profile import (
    Profile,
    ThreadProfile,
    make_speedscope_document,
    pack_profile,
    parse_pyspy_raw,
    unpack_profile,
)
from hangwatch.stacks.trees import build_call_tree, find_hottest_functions, layout_bars

TORCH_LIB = "/x/lib/python3.11/site-packages/torch"
BACKWARD_STACK = (
    f"log.<locals>.wrapper ({TORCH_LIB}/x.py:1);Tensor.backward"
    f" ({TORCH_LIB}/_tensor.py:5);_engine_run_backward ({TORCH_LIB}/autograd/graph.py:979)"
)
RAW_PROFILE = f"""\
thread (71): MainThread;<module> (/u/train.py:60);train (/u/train.py:52);Module._call_impl ({TORCH_LIB}/nn/module.py:1);forward (/u/model.py:9) 30
thread (71): MainThread;<module> (/u/train.py:60);train (/u/train.py:55);{BACKWARD_STACK} 60
thread (71): MainThread;<module> (/u/train.py:60);train (/u/train.py:57) 10
thread (80): wor;ker;run (/x/lib/python3.11/threading.py:982);wait (/x/lib/python3.11/threading.py:327) 100
thread (0x7F00);at::native::mul(int, int) (libtorch_cpu.so);odd (/u (copy)/a.py:3) 5
thread (90): hangwatch;poll (/x/lib/python3.11/site-packages/hangwatch/agent/recorder/poller.py:9) 100
"""


@pytest.fixture
def profile() -> Profile:
    return parse_pyspy_raw(RAW_PROFILE.splitlines(), 71)


def test_pyspy_output_is_parsed(profile: Profile) -> None:
    main, native, worker = profile.threads
    assert (main.thread, main.is_main, main.sample_count) == ("MainThread", True, 100)
    assert (worker.thread, worker.is_idle, worker.is_main) == ("wor;ker", True, False)
    assert native.stacks[0][0] == (
        Frame(function="at::native::mul(int, int)", file="libtorch_cpu.so", line=0), Frame(function="odd", file="/u (copy)/a.py", line=3),
    )  # fmt: skip
    assert profile.shown_threads == (
        main,
        native,
    ), "who only waits is left out, and so is our own thread"
    for bad in ("x", "thread (1): a;f (a.py:1) many", "f (a.py:1) 3"):
        with pytest.raises(ValueError, match="not a line of samples"):
            parse_pyspy_raw([bad], 71)


def test_pack_round_trip(profile: Profile) -> None:
    assert unpack_profile(pack_profile(profile)) == profile
    good = json.loads(pack_profile(profile))
    for bad in (
        "",
        "[]",
        "{}",
        json.dumps(good | {"frames": []}),
        json.dumps(good | {"threads": [{"stacks": [[[-1], 1]]}]}),
    ):
        with pytest.raises(ValueError, match=r"not a profile|a frame has|Expecting"):
            unpack_profile(bad)


def test_too_many_stacks_lose_the_rarest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hangwatch.stacks.profile.MAX_PROFILE_FRAMES", 7)
    profile = parse_pyspy_raw(
        [f"thread (1): MainThread;f (/u/a.py:{n});g (/u/a.py:{n}) {n}" for n in range(1, 6)], 1
    )
    assert (profile.dropped_samples, profile.threads[0].sample_count) == (1 + 2, 5 + 4 + 3)


def test_libraries_fold_and_user_frames_stay(profile: Profile) -> None:
    (module,) = build_call_tree(profile.threads[0].stacks)
    (train,) = module.children
    lines = tuple((line.line, line.samples) for line in train.lines)
    assert (train.function, train.samples, train.own, lines) == (
        "train",
        100,
        10,
        ((55, 60), (52, 30), (57, 10)),
    )
    backward, forward = train.children
    assert (backward.function, backward.library, backward.samples) == ("Tensor.backward", True, 60)
    assert backward.innermost is not None and backward.innermost.function == "_engine_run_backward"
    assert (forward.function, forward.library, forward.own) == (
        "forward",
        False,
        30,
    ), "what lies between is left out"


def test_hottest_functions_are_innermost_user_functions(profile: Profile) -> None:
    assert [
        (f.function, f.line, n) for f, n in find_hottest_functions(profile.threads[0].stacks)
    ] == [("train", 55, 70), ("forward", 9, 30)]
    only = ((Frame(function="wait", file="/x/lib/python3.11/threading.py", line=3),), 4)
    assert find_hottest_functions([only])[0][0].function == "wait"


def test_endless_recursion_ends() -> None:
    frames = tuple(Frame(function="f", file="/u/a.py", line=1) for _ in range(400))
    depth, node = 0, build_call_tree([(frames, 1)])
    while node:
        depth, node = depth + 1, node[0].children
    assert depth < 100
    assert len(layout_bars([(frames, 1)], 0.0, 1, 0.0)) == 400


def test_the_flame_graph_is_as_wide_as_its_samples(profile: Profile) -> None:
    bars = layout_bars(profile.threads[0].stacks, 0.5, 200, 0.001)
    widths = {(b.frame.function, b.frame.line): (b.x, b.width, b.depth) for b in bars}
    assert widths["<module>", 60] == (0.5, 0.5, 0)
    assert widths["train", 55][1] == 0.3 and widths["train", 52][1] == 0.15
    starts = sorted(b.x for b in bars if b.depth == 1)
    assert starts == pytest.approx([0.5, 0.65, 0.95])


def test_profile_files(profile: Profile) -> None:
    hostile = ThreadProfile(
        thread="</svg>&",
        is_main=True,
        stacks=(((Frame(function="<script>\x1b[2J", file="/u/a.py", line=1),), 3),),
    )
    profiles = [(0, profile), (3, Profile(threads=(hostile,)))]
    picture = ondemand_routes.render_flamegraph(
        rendering.PageRenderer(""), "job <x>", profiles, 100
    )
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(t.startswith("train /u/train.py:55, 0.60 s") for t in titles)
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched"
    document = json.loads(ondemand_routes.render_speedscope("job", profiles, 100))
    assert [p["name"] for p in document["profiles"]][:1] == ["rank 0, MainThread"]
    for thread_profile in document["profiles"]:
        assert len(thread_profile["samples"]) == len(thread_profile["weights"]) and thread_profile[
            "endValue"
        ] == pytest.approx(sum(thread_profile["weights"]))
        assert all(
            0 <= n < len(document["shared"]["frames"])
            for sample in thread_profile["samples"]
            for n in sample
        )
    assert make_speedscope_document("x", [], "seconds", 1)["profiles"] == []


def test_profile_text(profile: Profile) -> None:
    main = profile.threads[0]
    hot = [
        recordings.HotFunction(function=f.function, file=f.file, line=f.line, samples=n)
        for f, n in find_hottest_functions(main.stacks)
    ]
    thread = recordings.ThreadTime(
        thread="MainThread",
        main=True,
        samples=100,
        hottest=hot,
        tree=list(build_call_tree(main.stacks)),
    )
    ranks = [
        {"rank": 1, "seconds": 1.0, "threads": [thread.model_dump()], "idle_threads": 2},
        {"rank": 2, "error": "py-spy may not attach"},
    ]
    lines = list(map(strip_style, format_recording({"rate": 100, "ranks": ranks})))
    assert lines[0] == "rank 1 · MainThread · 1.0 s at 100 Hz · 100 samples"
    assert lines[1] == "70 % in train (train.py:55), 30 % in forward (model.py:9)"
    assert any("> train" in line and "train.py:55 (60 %), :52, :57" in line for line in lines)
    assert any(
        "Tensor.backward … _engine_run_backward" in line and line.endswith("graph.py:979")
        for line in lines
    ), lines
    assert lines[-1] == "  ! py-spy may not attach"
    assert max(map(len, lines)) <= 80
