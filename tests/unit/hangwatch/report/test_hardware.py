"""What hosts report of their hardware, as text."""

from __future__ import annotations

import pytest

from hangwatch.model.hardware import Observation
from hangwatch.report.terminal import describe_observation, format_hardware


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (
            Observation(source="infiniband", about="mlx5_0/1", what="link_downed", before=2, now=3),
            "the link of mlx5_0/1 went down (2 to 3 times)",
        ),
        (
            Observation(source="kernel log", about="GPU 3b:00", what="xid", now="79"),
            "GPU 3b:00 reported Xid 79 (the GPU has fallen off the bus)",
        ),
        (
            Observation(source="kernel log", about="GPU 3b:00", what="xid", now="999"),
            "GPU 3b:00 reported Xid 999",
        ),
        (
            Observation(source="kernel log", about="process 7", what="oom_kill", now="python"),
            "the kernel killed process 7 (python) for lack of memory",
        ),
        (
            Observation(source="cgroup", about="/job", what="oom_kill", before=0, now=1),
            "processes in /job were killed for lack of memory (0 to 1)",
        ),
        (
            Observation(source="network", about="TCP", what="RetransSegs", before=5, now=900),
            "RetransSegs of TCP went from 5 to 900",
        ),
        (
            Observation(source="pressure", about="io", what="waiting_share", now=61.2),
            "tasks waited for io in 61.2 % of the last ten seconds",
        ),
    ],
)
def test_observation(observation: Observation, text: str) -> None:
    assert describe_observation(observation) == text


def test_text_of_a_host_is_cleaned_and_wrapped() -> None:
    item = {
        "host": "node1\x1b[2J",
        "source": "nvml",
        "about": "GPU 3",
        "what": "throttled",
        "before": None,
        "now": "hardware slowdown, " * 6,
        "weight": "hint",
        "age_s": 0.0,
    }
    lines = list(format_hardware({"hardware": [item]}))
    assert len(lines) > 1
    assert lines[0].startswith("node1: GPU 3 is throttled (hardware slowdown,")
    assert not any("\x1b" in line for line in lines)
    assert list(format_hardware({})) == []


def test_sources_that_could_not_be_read() -> None:
    gap = {
        "hosts": ["node1", "node2", "node3", "node4"],
        "source": "kernel log",
        "reason": "/dev/kmsg may not be read",
        "remedy": "give the node agent CAP_SYSLOG",
    }
    text = " ".join(line.strip() for line in format_hardware({"hardware_missing": [gap]}))
    assert text == (
        "not read on node1, node2, node3 and 1 more: kernel log, /dev/kmsg may not be read; give the"
        " node agent CAP_SYSLOG"
    )
