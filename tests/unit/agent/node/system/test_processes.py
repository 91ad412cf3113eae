"""Reading /proc from captured trees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery import rings, watchlist
from hangwatch.agent.node.system import processes
from hangwatch.agent.node.system.permission import PtraceFacts
from hangwatch.agent.node.system.processes import CpuActivity
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import ProcessIdentity
from tests.simulation.waiting import wait_until

SECOND_NS = 1_000_000_000


def stat_line(
    pid: int,
    *,
    name: str = "python",
    state: str = "S",
    parent: int = 1,
    ticks: int = 5,
    reaped: int = 0,
    start: int = 100,
    code: int = 0,
) -> str:
    head = (
        f"{pid} ({name}) {state} {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 {reaped} 20 0 1 0 {start} "
    )
    return head + " ".join(["0"] * 29) + f" {code}\n"


def add_process(
    proc: Path,
    pid: int,
    *,
    parent: int = 1,
    env: dict[str, str] | None = None,
    children: tuple[int, ...] = (),
    turns: str = "",
    **stat: str | int,
) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    for folder in (task, proc / str(pid)):
        (folder / "stat").write_text(stat_line(pid, parent=parent, **stat))  # type: ignore[arg-type]
    if turns:
        (task / "schedstat").write_text(turns)
    (task / "children").write_text(" ".join(map(str, children)) + " ")
    (proc / str(pid) / "environ").write_bytes(
        b"".join(f"{k}={v}".encode() + b"\0" for k, v in (env or {}).items())
    )
    (proc / str(pid) / "cmdline").write_bytes(b"python\0train.py\0")


def make_rank_env(number: int, **more: str) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": "4", "HANGWATCH_JOB": "j"} | more


def test_a_name_with_brackets_and_spaces() -> None:
    stat = processes.parse_stat(
        stat_line(
            7, name="a) R 9 (b", state="D", parent=3, ticks=12, reaped=4, start=55, code=9
        ).encode()
    )
    assert (
        stat.state,
        stat.parent_pid,
        stat.cpu_ticks,
        stat.reaped_ticks,
        stat.start_ticks,
        stat.exit_code,
    ) == ("D", 3, 12, 4, 55, 9)


@pytest.mark.parametrize("raw", [b"", b"7 (x", b"7 (x) S 1", b"7 (x) \xff 1"])
def test_half_a_stat_line_is_an_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"stat line|invalid literal"):
        processes.parse_stat(raw)


def test_reused_pid_is_not_alive(tmp_path: Path) -> None:
    add_process(tmp_path, 7)
    add_process(tmp_path, 8, state="Z")
    proc = str(tmp_path)
    assert processes.read_live_stat(7, 100, proc) is not None
    assert processes.read_live_stat(7, 101, proc) is None
    assert processes.read_live_stat(8, 100, proc) is None
    assert processes.read_live_stat(9, 100, proc) is None


def test_one_tick_per_second_is_idle_but_two_together_are_not(tmp_path: Path) -> None:
    activity = CpuActivity(last_busy_ns=0)

    def read_activity(ticks: int, now_ns: int) -> int:
        proc = tmp_path / str(ticks)
        add_process(proc, 7, ticks=ticks)
        activity.update_activity(7, now_ns, proc=str(proc))
        return activity.last_busy_ns

    for second in range(10):
        assert read_activity(100 + second, second * SECOND_NS) == 0
    assert read_activity(111, 9 * SECOND_NS + 1) == 9 * SECOND_NS + 1
    assert read_activity(112, 9 * SECOND_NS + 2) == 9 * SECOND_NS + 1


@pytest.mark.parametrize(
    ("samples", "busy"),
    [
        # A thread that computes beside many others, and one whose turn did not come
        ([("R", f"{4_000_000 * n} {990_000_000 * n} {n}\n") for n in range(1, 6)], 4),
        ([("R", "4000000 990000000 1\n")] * 5, 4),
        # A thread that wakes now and then
        ([("S", f"{4_000_000 * n} {240_000_000 * n} {50 * n}\n") for n in range(1, 6)], 0),
        ([("S", "4000000 990000000 1\n")] * 5, 0),
        ([(state, "4000000 990000000 1\n") for state in "RSRSR"], 0),
        ([("R", "0 0 0\n")] * 5, 0),  # a kernel that does not count it
        ([("R", "")] * 5, 0),
    ],
)
def test_cpu_starved_process_is_not_idle(
    tmp_path: Path, samples: list[tuple[str, str]], busy: int
) -> None:
    activity = CpuActivity(last_busy_ns=0)
    for second, (state, turns) in enumerate(samples):
        add_process(tmp_path / str(second), 7, state=state, turns=turns)
        activity.update_activity(
            7, 100 * SECOND_NS + second * SECOND_NS, proc=str(tmp_path / str(second))
        )
    assert activity.last_busy_ns == (100 + busy) * SECOND_NS * bool(busy)


@pytest.mark.parametrize(("bytes_per_s", "busy_s"), [(1_000_000, 104), (50_000, 0)])
def test_thread_in_uninterruptible_sleep_is_not_idle_while_its_data_moves(
    tmp_path: Path, bytes_per_s: int, busy_s: int
) -> None:
    activity = CpuActivity(last_busy_ns=0)
    for second in range(5):
        proc = tmp_path / str(second)
        add_process(proc, 7, state="D")
        text = f"rchar: 5\nwchar: {bytes_per_s * second}\nsyscr: 900\n"
        (proc / "7" / "task" / "7" / "io").write_text(text)
        activity.update_activity(7, (100 + second) * SECOND_NS, proc=str(proc))
    assert activity.last_busy_ns == busy_s * SECOND_NS


def test_calling_thread_counts_beside_main_thread(tmp_path: Path) -> None:
    activity = CpuActivity(last_busy_ns=0)
    for second in range(4):
        proc = tmp_path / str(second)
        add_process(proc, 7)
        task = proc / "7" / "task" / "9"
        if second < 3:
            task.mkdir()
            (task / "stat").write_text(stat_line(9, ticks=50 * second, state="RRD"[second]))
        activity.update_activity(7, (100 + second) * SECOND_NS, 9, str(proc))
        assert activity.state == "SSDS"[second], "a thread that has ended is in no state"
    assert activity.last_busy_ns == 102 * SECOND_NS


def test_cpu_time_includes_children(tmp_path: Path) -> None:
    add_process(
        tmp_path, 7, children=(8, 9), ticks=processes.TICKS_PER_S, turns="1000000000 500000000 9\n"
    )
    add_process(tmp_path, 8, ticks=0, reaped=2 * processes.TICKS_PER_S, turns="1 250000000 9\n")
    add_process(tmp_path, 10, ticks=99 * processes.TICKS_PER_S)
    assert processes.read_tree_usage_s(7, str(tmp_path)) == (
        3.0,
        0.75,
    ), "9 has ended just now, and 10 is none of its children"
    assert processes.read_tree_usage_s(11, str(tmp_path)) == (0.0, 0.0)


def test_wait_status() -> None:
    assert rings.from_wait_status(0) == ExitInfo(exit_status=0)
    assert rings.from_wait_status(3 << 8) == ExitInfo(exit_status=3)
    assert rings.from_wait_status(9) == ExitInfo(signal=9)
    assert rings.from_wait_status(11 | 0x80) == ExitInfo(signal=11), "with a core dump"


def test_exit_status_is_read_from_zombie_but_not_from_vanished_process(tmp_path: Path) -> None:
    add_process(tmp_path, 7, state="Z", code=str(6))
    assert rings.read_exit_info(7, 100, None, str(tmp_path)) == ExitInfo(signal=6)
    assert rings.read_exit_info(7, 99, None, str(tmp_path)) == ExitInfo()
    assert rings.read_exit_info(8, 100, None, str(tmp_path)) == ExitInfo()


def test_child_reaped_before_first_read() -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 5"], dict(os.environ))
    fd = os.pidfd_open(pid)
    try:
        os.waitpid(pid, 0)
        # Kernels before 6.15 no longer know the status, and then none is claimed.
        assert rings.read_exit_info(pid, 1, fd) in (ExitInfo(exit_status=5), ExitInfo())
    finally:
        os.close(fd)


def test_siblings_under_launcher_and_wrapper(tmp_path: Path) -> None:
    add_process(
        tmp_path,
        10,
        env={"HANGWATCH_JOB": "j", "WORLD_SIZE": "4"},
        children=(11, 21, 31, 41, 51, 61),
    )
    add_process(
        tmp_path, 11, parent=10, env=make_rank_env(0), children=(12,)
    )  # a wrapper of rank 0
    add_process(tmp_path, 12, parent=11, env=make_rank_env(0), children=(13,))  # rank 0 itself
    add_process(tmp_path, 13, parent=12, env=make_rank_env(0))  # a DataLoader worker of the rank
    add_process(tmp_path, 21, parent=10, env=make_rank_env(1))  # never imports torch
    add_process(tmp_path, 31, parent=10, env=make_rank_env(2, HANGWATCH_JOB="other"))
    add_process(tmp_path, 41, parent=10, env={"HANGWATCH_JOB": "j"})  # no rank
    add_process(tmp_path, 51, parent=10, env=make_rank_env(3), state="Z")
    add_process(tmp_path, 61, parent=10, env=make_rank_env(1))  # a second one of rank 1
    proc = str(tmp_path)
    known = make_identity("j", 0)
    assert get_launcher(12, known, proc) == 10
    sibling_processes = watchlist.SiblingFinder(proc).find_siblings({12: known}, {("j", 0, 0)})
    assert [(f.pid, f.launch.rank) for f in sibling_processes] == [(21, 1)]
    assert (
        watchlist.SiblingFinder(proc).find_siblings({12: known}, {("j", 0, 0), ("j", 0, 1)}) == []
    )
    assert watchlist.SiblingFinder(proc).find_siblings({99: known}, set()) == []
    nested = make_identity("j/nested:1", 0)
    assert watchlist.SiblingFinder(proc).find_siblings({12: nested}, set()) == [], (
        "of a world inside a rank"
    )


@pytest.mark.parametrize(
    ("rank", "count", "local"),
    [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ],
)
def test_siblings_under_mpirun_and_srun(tmp_path: Path, rank: str, count: str, local: str) -> None:
    def make_task_env(number: int, **added: str) -> dict[str, str]:
        return {rank: str(number), count: "4", local: str(number), **added}

    add_process(tmp_path, 10, children=(11, 21, 31, 41))
    add_process(tmp_path, 11, parent=10, env=make_task_env(0))  # the program itself sets RANK
    add_process(tmp_path, 21, parent=10, env=make_task_env(1))
    add_process(tmp_path, 31, parent=10, env={**make_task_env(2), count: "8"})  # another step
    add_process(tmp_path, 41, parent=10, env=make_task_env(3))
    proc = str(tmp_path)
    found = watchlist.SiblingFinder(proc).find_siblings(
        {11: make_identity("m:1", 0)}, {("m:1", 0, 0)}
    )
    assert [(f.pid, f.launch.job, f.launch.rank, f.launch.world_size) for f in found] == [
        (21, "m:1", 1, 4),
        (41, "m:1", 3, 4),
    ]
    other_rank = watchlist.SiblingFinder(proc).find_siblings({11: make_identity("m:1", 2)}, set())
    assert other_rank == [], "the tasks are numbered in another way than the ranks"


def test_tasks_that_start_the_ranks_are_none(tmp_path: Path) -> None:
    """srun has started a torchrun on each node."""
    task = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "HANGWATCH_JOB": "j"}
    add_process(tmp_path, 10, children=(11, 21))
    add_process(tmp_path, 11, parent=10, env=task, children=(12,))
    add_process(tmp_path, 12, parent=11, env={**task, **make_rank_env(0)})
    add_process(tmp_path, 21, parent=10, env={**task, "SLURM_PROCID": "1"})
    proc = str(tmp_path)
    assert get_launcher(12, make_identity("j", 0), proc) == 11
    assert watchlist.SiblingFinder(proc).find_siblings({12: make_identity("j", 0)}, set()) == []


def test_launcher_is_found_once(tmp_path: Path) -> None:
    add_process(tmp_path, 10, children=(12, 21))
    add_process(tmp_path, 12, parent=10, env=make_rank_env(0))
    finder = watchlist.SiblingFinder(str(tmp_path))
    recorded = {12: make_identity("j", 0)}
    assert finder.find_siblings(recorded, set()) == []
    (tmp_path / "12" / "environ").unlink()
    add_process(tmp_path, 21, parent=10, env=make_rank_env(1))
    assert [found.pid for found in finder.find_siblings(recorded, set())] == [21]
    assert finder.find_siblings({12: make_identity("other", 0)}, set()) == []


def get_launcher(pid: int, known: ProcessIdentity, proc: str) -> int | None:
    launcher = watchlist.find_launcher(pid, known, proc)
    return None if launcher is None else launcher.pid


def make_identity(job: str, rank: int) -> ProcessIdentity:
    return ProcessIdentity(job=job, rank=rank, world_size=4, pid=12, start_ticks=100)


def test_refusal_reason() -> None:
    plain = PtraceFacts(
        has_capability=True, yama_scope=None, has_seccomp_filter=False, is_ptrace_filtered=False
    )
    assert (
        "seccomp"
        in PtraceFacts(
            has_capability=True, yama_scope=None, has_seccomp_filter=True, is_ptrace_filtered=True
        ).explain_refusal()
    )
    assert (
        "ptrace_scope is 2 and CAP_SYS_PTRACE is missing"
        in PtraceFacts(
            has_capability=False, yama_scope=2, has_seccomp_filter=False, is_ptrace_filtered=False
        ).explain_refusal()
    )
    assert (
        "ptrace_scope is 3"
        in PtraceFacts(
            has_capability=True, yama_scope=3, has_seccomp_filter=False, is_ptrace_filtered=False
        ).explain_refusal()
    )
    assert plain.explain_refusal() == "the kernel refuses it"


def test_exit_status_that_is_published_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is reaped and not in /proc any more, and its pidfd does not know yet."""
    known = iter([None, None, None, 3 << 8])
    monkeypatch.setattr(rings, "_read_pidfd_status", lambda pidfd: next(known))
    assert rings.read_exit_info(1 << 22, 1, pidfd=99) == ExitInfo(exit_status=3)


def test_unknown_exit_status_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    monkeypatch.setattr(rings, "_read_pidfd_status", tries.append)
    assert rings.read_exit_info(1 << 22, 1, pidfd=99) == ExitInfo()
    assert len(tries) == 5
    assert rings.read_exit_info(1 << 22, 1, pidfd=None) == ExitInfo()


ATTACH = """
import ctypes, sys, time
PTRACE_ATTACH = 16
assert ctypes.CDLL(None).ptrace(PTRACE_ATTACH, int(sys.argv[1]), None, None) == 0
print("attached", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("launcher", "state", "idle_s"),
    [
        ([], "S", 3),
        (["sh", "-c", '"$@"; exit', "sh"], "S", 3),
        (["sh", "-c", '"$@" & exit', "sh"], "t", 10),
    ],
    ids=["own child", "started by a script", "another debugger"],
)
def test_process_that_our_reader_holds_is_neither_stopped_nor_idle(
    launcher: list[str], state: str, idle_s: int
) -> None:
    held = subprocess.Popen(["sleep", "60"])
    activity = CpuActivity(last_busy_ns=0)
    activity.update_activity(held.pid, 3 * SECOND_NS)
    tracer = subprocess.Popen(
        [*launcher, sys.executable, "-c", ATTACH, str(held.pid)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert tracer.stdout is not None and tracer.stdout.readline() == b"attached\n"
        assert wait_until(lambda: processes.read_stat(held.pid).state == "t", 5.0)
        activity.update_activity(held.pid, 10 * SECOND_NS)
    finally:
        os.killpg(tracer.pid, signal.SIGKILL)
        held.kill()
        tracer.communicate()
        held.wait()
    idle_ns = 10 * SECOND_NS - activity.last_busy_ns
    assert (activity.state, idle_ns) == (state, idle_s * SECOND_NS)
    assert activity.paused_ns == (10 - idle_s) * SECOND_NS


@pytest.mark.parametrize(
    ("state", "tracer", "tracer_status", "is_own"),
    [
        pytest.param("t (tracing stop)", 9, "Tgid: OWN\nPPid: 1\n", True, id="own thread"),
        pytest.param("t (tracing stop)", 9, "Tgid: 9\nPPid: OWN\n", True, id="own child"),
        pytest.param("t (tracing stop)", 9, "Tgid: 9\nPPid: 8\n", True, id="below own child"),
        pytest.param("t (tracing stop)", 9, "Tgid: 9\nPPid: 1\n", False, id="another"),
        pytest.param("t (tracing stop)", 0, "", False, id="in another container"),
        pytest.param("R (running)", 0, "", True, id="the pause has just ended"),
    ],
)
def test_own_tracer(
    tmp_path: Path, state: str, tracer: int, tracer_status: str, is_own: bool
) -> None:
    tracer_status = tracer_status.replace("OWN", str(os.getpid()))
    held_status = f"State: {state}\nTracerPid: {tracer}\n"
    own_child_status = f"Tgid: 8\nPPid: {os.getpid()}\n"
    for pid, status in ((7, held_status), (8, own_child_status), (9, tracer_status)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(status)
    assert processes.is_traced_by_own(7, str(tmp_path)) is is_own
