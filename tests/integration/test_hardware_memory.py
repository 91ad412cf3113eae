"""A rank that the kernel really kills for lack of memory, in a cgroup of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.job import running_job
from tests.harness.server import running_server
from tests.simulation.waiting import wait_for_value

PROGRAM = Path(__file__).with_name("memory_program.py")
LIMIT_BYTES = 64 << 20
START_S = 90.0
VERDICT_S = 30.0  # the rank takes a while to use up its memory
# Where a group can be made, and the file with its limit, for each version of cgroups.
_PLACES = {
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


@pytest.fixture
def cgroup() -> Iterator[Path]:
    groups = (make_group(root, limit_file) for root, limit_file in _PLACES.items())
    group = next(filter(None, groups), None)
    if group is None:
        pytest.skip("this machine lets no test make a cgroup with a limit on memory")
    yield group
    wait_for_value(lambda: not (group / "cgroup.procs").read_text(), "its processes end")
    group.rmdir()


def make_group(root: Path, limit_file: str) -> Path | None:
    """A cgroup with the limit; None if that is not possible there."""
    group = root / f"hangwatch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit_file).write_text(str(LIMIT_BYTES))
    except OSError:
        if group.exists():
            group.rmdir()
        return None
    return group


def test_rank_that_is_killed_for_lack_of_memory(cgroup: Path, tmp_path: Path) -> None:
    env = {"MEMORY_CGROUP": str(cgroup)}
    with (
        running_server(tmp_path / "server") as server,
        running_job(PROGRAM, 2, tmp_path / "job", server.url, env=env) as job,
    ):
        wait_for_value(lambda: job.planted_at, "the fault", START_S)

        def find_advice() -> str | None:
            for item in server.get_items("incidents", job="job"):
                incident = server.get(f"incidents/{item['id']}")
                assert (incident["kind"], incident["culprits"]) == ("dead_rank", [1])
                if incident["hardware"]:
                    return str(incident["advice"])
            return None

        advice = wait_for_value(find_advice, "the verdict with its cause", VERDICT_S)
        assert "for lack of memory. Raise the memory limit" in advice
