"""Which recorder serves in a job that is started from here, and why."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping

from ...recorder.checks.settings import load_check_settings
from ...recorder.native import build, cache
from .findings import Finding

NAME = "recorder"


def check_recorder(env: Mapping[str, str]) -> Iterator[Finding]:
    """What HANGWATCH_CHECKS asks for, then the recorder.

    Builds the native recorder where it is wanted and not there yet, as a node agent would: that
    takes some 20 s once.
    """
    examined = load_check_settings(env)
    for problem in examined.problems:
        yield Finding(
            name="checks", ok=None, detail="not all that is asked for is understood", remedy=problem
        )
    if examined.any_enabled:
        detail = (
            f"Python's, which alone can check {examined.enabled_names}: one call in"
            f" {examined.sample_every} is sampled"
        )
        yield Finding(name=NAME, ok=True, detail=detail)
        return
    if cache.get_recorder_mode(env) == "python":
        yield Finding(name=NAME, ok=True, detail="Python's, as HANGWATCH_RECORDER asks for")
        return
    try:
        done = subprocess.run(
            build.get_build_command(), env=build.make_build_environment(env), cwd="/", capture_output=True, text=True, errors="replace",
            timeout=build.COMPILE_TIMEOUT_S + build.CHECK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        yield judge_build(1, str(error), env)
    else:
        yield judge_build(
            done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip(), env
        )


def judge_build(status: int, output: str, env: Mapping[str, str]) -> Finding:
    """What the build, or finding it done, means."""
    if status == 0:
        return Finding(name=NAME, ok=True, detail=f"native, {output.splitlines()[-1]}")
    why = (
        output.splitlines()[-1].removeprefix("hangwatch: ")
        if output
        else f"building it ended with status {status}"
    )
    if "No module named 'torch'" in why:
        return Finding(name=NAME, ok=None, detail="no torch, so none is needed")
    wanted = cache.get_recorder_mode(env) == "native"
    remedy = (
        "it takes some 8 µs a collective, the native one 0.4; HANGWATCH_RECORDER=python asks for it"
    )
    return Finding(
        name=NAME,
        ok=None if wanted else True,
        detail=f"Python's: {why}",
        remedy=remedy if wanted else "",
    )
