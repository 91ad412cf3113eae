"""Checks which recorder a job that is started here would use, and why."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping

from ...recorder.checks.settings import load_check_settings
from ...recorder.native import build, cache
from .findings import Finding

NAME = "recorder"


def check_recorder(env: Mapping[str, str]) -> Iterator[Finding]:
    """Checks HANGWATCH_CHECKS, then the recorder.

    Builds the native recorder if it would be used and is missing, as a node agent would: that takes
    about 20 s, once.
    """
    check_settings = load_check_settings(env)
    for problem in check_settings.problems:
        yield Finding(
            name="checks", ok=None, detail="HANGWATCH_CHECKS is partly invalid", remedy=problem
        )
    if check_settings.any_enabled:
        detail = (
            f"Python's, since only it can check {check_settings.enabled_names}: one call in"
            f" {check_settings.sample_every} is sampled"
        )
        yield Finding(name=NAME, ok=True, detail=detail)
        return
    if cache.get_recorder_mode(env) == "python":
        yield Finding(name=NAME, ok=True, detail="Python's, as HANGWATCH_RECORDER says")
        return
    try:
        done = subprocess.run(
            build.get_build_command(), env=build.make_build_environment(env), cwd="/", capture_output=True, text=True, errors="replace",
            timeout=build.COMPILE_TIMEOUT_S + build.CHECK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        yield judge_build(1, str(error), env)
    else:
        output = done.stdout if done.returncode == 0 else done.stderr
        yield judge_build(done.returncode, output.strip(), env)


def judge_build(status: int, output: str, env: Mapping[str, str]) -> Finding:
    """The finding for the exit status and the output of the build."""
    if status == 0:
        return Finding(name=NAME, ok=True, detail=f"native, {output.splitlines()[-1]}")
    reason = f"the build ended with status {status}"
    if output:
        reason = output.splitlines()[-1].removeprefix("hangwatch: ")
    if "No module named 'torch'" in reason:
        return Finding(name=NAME, ok=None, detail="no torch, so none is needed")
    detail = f"Python's: {reason}"
    if cache.get_recorder_mode(env) != "native":
        return Finding(name=NAME, ok=True, detail=detail)
    remedy = (
        "it takes about 8 µs per collective, the native one 0.4; HANGWATCH_RECORDER=python selects"
        " it"
    )
    return Finding(name=NAME, ok=None, detail=detail, remedy=remedy)
