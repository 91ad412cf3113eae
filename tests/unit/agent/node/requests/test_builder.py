"""When a node agent has the native recorder built, and what it leaves alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.node.requests.builder import (
    REQUIRED_MEMORY_BYTES,
    RecorderBuilder,
    get_free_memory_bytes,
)
from hangwatch.agent.node.system.runtime import AgentLog
from hangwatch.agent.recorder.native import build, cache
from tests.simulation.waiting import wait_until

BUILD_REQUEST = {"without": cache.NOT_BUILT_REASON}
GIB = 1 << 30


class RecordedLog(AgentLog):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)


def make_builder(
    log: AgentLog,
    env: dict[str, str] | None = None,
    left: int = REQUIRED_MEMORY_BYTES,
    **options: Any,
) -> RecorderBuilder:
    return RecorderBuilder(
        log, {"CXX": "c++"} if env is None else env, get_free_memory=lambda: left, **options
    )


def test_builds_once_and_logs_result(tmp_path: Path) -> None:
    for status, message in (
        (0, "the native recorder is built, for the next job"),
        (1, "the native recorder could not be built"),
    ):
        log, mark = RecordedLog(), tmp_path / f"run{status}"
        made = make_builder(
            log,
            command=[
                sys.executable,
                "-c",
                f"import sys; open({str(mark)!r}, 'a').write('x'); sys.exit({status})",
            ],
        )

        def run_build(made: RecorderBuilder = made, log: RecordedLog = log) -> bool:
            made.update_build(BUILD_REQUEST)
            return bool(log.lines)

        assert wait_until(run_build, 20.0)
        made.update_build(BUILD_REQUEST)
        assert mark.read_text() == "x"
        assert len(log.lines) == 1
        assert log.lines[0].startswith(message)


@pytest.mark.parametrize(
    "identity",
    [{}, {"without": ""}, {"without": "HANGWATCH_RECORDER=python"}, {"without": "g++ failed"}],
)
def test_no_build_without_use(identity: dict[str, str], tmp_path: Path) -> None:
    log = RecordedLog()
    make_builder(log, command=["/nonexistent"]).update_build(identity)
    assert not log.lines


def test_missing_build_tools_are_reported() -> None:
    for options, expected_message in (
        ({"env": {"PATH": "/nonexistent"}}, build.NO_COMPILER_MESSAGE),
        ({"left": REQUIRED_MEMORY_BYTES - 1}, "2 GiB of memory"),
        ({"command": ["/nonexistent"]}, "No such file"),
    ):
        log = RecordedLog()
        builder = make_builder(log, **options)
        builder.update_build(BUILD_REQUEST)
        builder.update_build(BUILD_REQUEST)
        assert len(log.lines) == 1
        assert expected_message in log.lines[0]


def make_host_files(root: Path, *groups: str) -> tuple[str, str]:
    """A /proc with 8 GiB left, and the folder of its control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\nHugePages_Total: 0\n"
    )
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in groups))
    return str(root / "proc"), str(root / "cgroup")


def make_cgroup(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_remaining_memory(tmp_path: Path) -> None:
    """The least of what the host and each group around the process have; the page cache counts as
    left.
    """
    proc, cgroups = make_host_files(tmp_path, "4:memory:/pod/a", "0::/pod/b")
    assert get_free_memory_bytes(proc, cgroups) == 8 * GIB
    assert get_free_memory_bytes(str(tmp_path / "none"), cgroups) == 0
    v2 = {
        "memory.current": str(5 * GIB),
        "memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {GIB}\n",
    }
    make_cgroup(Path(cgroups, "pod/b"), {"memory.max": "max", **v2})
    assert get_free_memory_bytes(proc, cgroups) == 8 * GIB
    make_cgroup(Path(cgroups, "pod"), {"memory.max": str(10 * GIB), **v2})
    assert get_free_memory_bytes(proc, cgroups) == 7 * GIB
    v1 = {
        "memory.usage_in_bytes": str(3 * GIB),
        "memory.stat": f"total_active_file {GIB}\ntotal_inactive_file 0\n",
    }
    make_cgroup(Path(cgroups, "memory"), {"memory.limit_in_bytes": str(4 * GIB), **v1})
    assert get_free_memory_bytes(proc, cgroups) == 2 * GIB
