"""The recorder sees every way in which torch communicates, C++ and compiled code included, and each
call once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import job, native
from tests.harness.depth import choose_seed, draw_recorder
from tests.harness.processes import clean_environment
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

CASES_SCRIPT = Path(__file__).parent / "recorder_cases" / "cases.py"

COLLECTIVES: dict[str, list[str]] = {
    # Construction checks the parameters' shapes, and sends them and the buffers out; each forward
    # sends the buffers, each backward reduces; after the first one the buckets are rebuilt in the
    # order of use.
    "ddp": [
        *("all_gather", "broadcast", "broadcast", "broadcast"),
        *("broadcast", "broadcast", "all_reduce", "broadcast", "broadcast"),
        *("broadcast", "broadcast", "all_reduce"),
        *("broadcast", "broadcast", "all_reduce"),
    ],
    # Two layers, two steps: gathered for the forward and again for the backward.
    "fsdp2": (["all_gather_into_tensor"] * 4 + ["reduce_scatter_tensor"] * 2) * 2,
    # Three sharded parameters and one replicated; then one reduction in each forward and one in
    # each backward.
    "tensor_parallel": ["scatter"] * 3 + ["broadcast"] + ["all_reduce"] * 4,
    "pipelining": [],
    # Each step: DDP reduces, then each rank sends the parameters out that it has updated; DDP's
    # rebuilt buckets in between.
    "zero": [
        "all_reduce",
        "broadcast",
        "broadcast",
        "broadcast",
        "broadcast",
        "all_reduce",
        "broadcast",
        "broadcast",
    ],
    "functional": [
        "all_reduce",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "broadcast",
    ],
    "compiled": ["all_reduce"] * 3,
    "compiled_with_breaks": ["all_reduce"] * 4,
    "without_data": ["barrier"],
    "raising": ["broadcast", "all_reduce", "barrier"],
    "unusual_tensors": ["all_reduce", "broadcast"] * 2 + ["all_reduce", "all_reduce", "broadcast"],
    "coalescing": ["all_reduce_coalesced", "all_reduce_coalesced"],
    "inference_mode": ["all_reduce", "broadcast"],
    "unknown_operators": ["exchange", "all_reduce", "update", "exchange", "exchange"],
    "objects": ["all_gather", "all_gather", "broadcast", "broadcast"],  # sizes, then contents
    "batched_p2p": [],
    "own_backend": ["all_reduce", "all_reduce", "all_reduce", "broadcast", "all_reduce"],
    "declared": [
        "all_reduce",
        "all_reduce",
        "all_reduce",
        "exchange",
        "reduce_scatter_tensor",
        "exchange",
    ],
    "every_collective": [
        *(
            "all_reduce",
            "reduce",
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter",
            "reduce_scatter_tensor",
        ),
        *("gather", "scatter", "all_to_all_single", "barrier", "monitored_barrier"),
    ],
    "blocked_in_the_operator": ["all_reduce"] * 30 + ["monitored_barrier"],
    "subgroups": [],  # in other groups only
}
WITHOUT_FRAMES = "threads_without_frames"
# Messages each way: the stages exchange shapes first (size of the size, size, contents), then a
# tensor per microbatch and step.
MESSAGE_COUNTS = {"pipelining": 3 + 2 * 4, "batched_p2p": 3}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("server"), stall_after_s=60) as running:
        yield running


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled backend. Compiled once, as torch serializes concurrent builds."""
    folder = native.shared_folder(tmp_path_factory, "extension")
    folder.mkdir(exist_ok=True)
    build_code = (
        "from torch.utils.cpp_extension import load; load('doubling',"
        f" [{str(CASES_SCRIPT.with_name('doubling.cpp'))!r}], build_directory='.',"
        " extra_cflags=['-O0'])"
    )
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # ninja is installed next to python
    compilation = subprocess.run(
        [sys.executable, "-c", build_code],
        cwd=folder,
        env=clean_environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert compilation.returncode == 0, compilation.stdout + compilation.stderr
    return folder


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables that select the recorder that the zoo's seed gives."""
    return native.recorder_env(draw_recorder("recorder_sees", choose_seed()), tmp_path_factory)


def run_cases(
    names: list[str],
    folder: Path,
    server: Server,
    recorder: dict[str, str],
    title: str,
    **env: str,
) -> dict[str, list[dict[str, Any]]]:
    """Runs the cases one after the other in a job named after ``title``. Returns what each of the
    two ranks read from its own ring, by case.
    """
    variables = {"CASES": ",".join(names), "SEEN_AT": str(folder), **recorder, **env}
    finished_job = job.run_job(
        CASES_SCRIPT, 2, folder, server.url, name=job_name(title, recorder), env=variables
    )
    assert finished_job.process.returncode == 0, finished_job.stderr
    seen = [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(2)]
    rings_by_case: dict[str, list[dict[str, Any]]] = {
        name: [rings[name] for rings in seen] for name in names
    }
    for name, rings in rings_by_case.items():
        for ring in rings:
            assert (ring["errors"], ring["faults"], ring["dropped"]) == (0, [], 0), name
            assert ring["recorder"] == recorder["HANGWATCH_RECORDER"]
            assert ring["setup"][0] == "init_process_group", name
    return rings_by_case


def job_name(name: str, recorder: dict[str, str]) -> str:
    return f"{name}-{recorder['HANGWATCH_RECORDER']}"


def select_calls(ring: dict[str, Any], kind: str, desc: str = "default_pg") -> list[dict[str, Any]]:
    return [
        call
        for stream in ring["streams"]
        if stream["kind"] == kind and stream["desc"] == desc
        for call in stream["calls"]
    ]


def test_each_call_is_recorded_once(
    tmp_path: Path, server: Server, recorder: dict[str, str], extension: Path
) -> None:
    names = [*sorted(COLLECTIVES), WITHOUT_FRAMES]
    title, env = "cases", {"EXTENSION": str(extension)}
    rings_by_case = run_cases(names, tmp_path, server, recorder, title, **env)
    for name in COLLECTIVES.keys() - {"subgroups"}:
        for ring in rings_by_case[name]:
            check_calls(name, ring)
    check_arguments(rings_by_case["every_collective"])
    check_groups(rings_by_case["subgroups"])
    check_unknown_operators(rings_by_case["unknown_operators"])
    check_declarations(rings_by_case["declared"])
    check_threads_without_frames(rings_by_case[WITHOUT_FRAMES])
    check_api(rings_by_case, job_name(title, recorder), server)


def test_thread_without_python_frame_with_checks(tmp_path: Path, server: Server) -> None:
    python = {"HANGWATCH_RECORDER": "python", "HANGWATCH_CHECKS": "nonfinite"}
    names = [WITHOUT_FRAMES]
    rings_by_case = run_cases(names, tmp_path, server, python, WITHOUT_FRAMES)
    check_threads_without_frames(rings_by_case[WITHOUT_FRAMES])


def check_calls(name: str, ring: dict[str, Any]) -> None:
    calls = select_calls(ring, "collective")
    assert [call["op"] for call in calls] == COLLECTIVES[name], name
    assert [call["seq"] for call in calls] == list(range(1, len(calls) + 1)), name
    for kind in ("send", "recv"):
        messages = select_calls(ring, kind)
        assert [call["op"] for call in messages] == [kind] * MESSAGE_COUNTS.get(name, 0)
        calls += messages
    assert {call["file"] for call in calls} == {CASES_SCRIPT.name}, (
        "the site is the user's, not torch's"
    )
    for stream in ring["streams"]:
        unfinished = (
            stream["calls"][stream["completed"] :] if stream["completed"] is not None else []
        )
        # gloo's Work never reports these as completed, even after `wait()`.
        assert all(call["op"].startswith("reduce_scatter") for call in unfinished), unfinished


def check_api(rings_by_case: dict[str, list[dict[str, Any]]], job: str, server: Server) -> None:
    """The server shows the same counts, and no mismatch where arguments of unknown operators differ."""

    def read_counts() -> set[tuple[int, int]]:
        groups = [g for g in server.get_items("groups", job=job) if g["desc"] == "default_pg"]
        return {
            (member["rank"], member["entered"]) for group in groups for member in group["members"]
        }

    wanted = {
        (rank, len(select_calls(ring, "collective")))
        for rings in rings_by_case.values()
        for rank, ring in enumerate(rings)
    }
    assert wait_until(lambda: read_counts() == wanted, 10.0), f"{read_counts()}, not {wanted}"
    incidents = server.get_items("incidents", job=job)
    assert "mismatch" not in [incident["kind"] for incident in incidents]


def check_threads_without_frames(rings: list[dict[str, Any]]) -> None:
    for ring in rings:
        assert [call["op"] for call in select_calls(ring, "collective")] == ["barrier"] * 4


def check_arguments(rings: list[dict[str, Any]]) -> None:
    """The arguments are recorded as the user wrote them."""
    for ring in rings:
        by_op = {call["op"]: call for call in select_calls(ring, "collective")}
        assert by_op["all_reduce"]["reduce_op"] == "max"
        assert by_op["reduce"]["reduce_op"] == "sum"
        assert [by_op[op]["root"] for op in ("reduce", "broadcast", "gather", "scatter")] == [
            1,
            0,
            0,
            0,
        ]
        assert by_op["broadcast"]["shapes"] == [[4]]
        assert by_op["all_gather"]["shapes"] == [[4], [4]]
        assert by_op["reduce_scatter_tensor"]["shapes"] == [[8]]
        assert {call["function"] for call in by_op.values()} == {"every_collective"}


def check_unknown_operators(rings: list[dict[str, Any]]) -> None:
    """They are recorded generically."""
    for rank, ring in enumerate(rings):
        calls = select_calls(ring, "collective")
        own_shape = [1 + rank, 2]
        assert [call["shapes"] for call in calls] == [
            [own_shape, [3]],
            [[4]],
            [own_shape],
            [own_shape],
            [own_shape],
        ]
        assert [call["dtype"] for call in calls] == ["float32"] * 5
        (stream,) = [s for s in ring["streams"] if s["kind"] == "collective"]
        assert stream["completed"] == stream["entered"] == len(calls)


def check_groups(rings: list[dict[str, Any]]) -> None:
    """The calls of different groups are counted separately."""
    for rank, ring in enumerate(rings):
        assert ring["setup"] == ["init_process_group", "new_group", "new_group", "new_group"]
        assert len(select_calls(ring, "collective", "everyone")) == 5
        assert len(select_calls(ring, "collective", f"alone{rank}")) == 1
        assert not select_calls(ring, "collective", f"alone{1 - rank}")


def check_declarations(rings: list[dict[str, Any]]) -> None:
    for ring in rings:
        ops_by_group = {
            desc: [c["op"] for c in select_calls(ring, "collective", desc)]
            for desc in ("everyone", "mpi", "nested", "declared")
        }
        assert ops_by_group["everyone"] == ["outer", "all_reduce", "fails"]
        assert ops_by_group == {
            **ops_by_group,
            "mpi": ["Allreduce"] * 20,
            "nested": ["Inner"] * 20,
            "declared": ["put"] * 20 + ["afterwards"],
        }
        assert {tuple(s["ranks"]) for s in ring["streams"]} == {(0, 1)}
