"""What the tests of all rules share."""

from __future__ import annotations

from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob


def make_frame(
    function: str, file: str = "/home/me/train.py", line: int = 7, text: str | None = None
) -> Frame:
    return Frame(function=function, file=file, line=line, text=text)


def diagnose_only(job: ScriptedJob) -> Verdict:
    verdicts = job.list_due_verdicts()
    assert len(verdicts) == 1, [v.summary for v in verdicts]
    return verdicts[0]
