"""The status of a job as text."""

from __future__ import annotations

import pytest

from hangwatch.report.job_status import JobFacts, format_job_status


@pytest.mark.parametrize(
    ("steps_per_s", "pace"),
    [
        (3.14159, "3.1 steps per second"),
        (0.021, "1.3 steps per minute"),
        (0.0, "0.0 steps per second"),
    ],
)
def test_pace_of_a_healthy_job(steps_per_s: float, pace: str) -> None:
    job = JobFacts(
        state="running",
        expected=4,
        reported=4,
        last_seen_s=0.4,
        step=12,
        steps_per_s=steps_per_s,
        stall_after_s=60,
    )
    status, advice = format_job_status(job)
    assert f"{pace} (at step 12)" in status
    assert advice == ""
