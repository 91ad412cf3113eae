"""A job with hangwatch is the job without: its memory, graphs, results, exceptions, threads and files.

`equality/` has a function for each aspect. Each runs in a job of two ranks without hangwatch and
in one with it, and must return the same.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness import job, native
from tests.harness.depth import choose_seed, draw_recorder
from tests.harness.server import run_server

PROFILE_ASPECTS = ("profiles", "profiles_with_stacks")
JOB_TIMEOUT_S = 300.0
STACK_DUMP_SIGNAL = 62  # SIGRTMAX - 2
PROGRAM = Path(__file__).parent / "equality" / "program.py"
ASPECTS = re.findall(
    r"^@register_aspect\ndef (\w+)",
    "".join(path.read_text() for path in sorted(PROGRAM.parent.glob("*.py"))),
    re.M,
)


def run_program(
    folder: Path, url: str | None, env: Mapping[str, str], name: str = "plain"
) -> tuple[list[dict[str, Any]], job.LaunchedJob]:
    """Returns the reports of both ranks. Raises AssertionError with what they wrote if the job fails."""
    reports = folder / "reports"
    reports.mkdir(parents=True)
    variables = {
        "ASPECTS": ",".join(ASPECTS),
        "REPORT_DIR": str(reports),
        **env,
    }
    ended = job.run_job(PROGRAM, 2, folder, url, name=name, env=variables, timeout_s=JOB_TIMEOUT_S)
    outputs = [path.read_text() for path in sorted(reports.glob("*.out"))]
    assert ended.process.returncode == 0, "\n".join([name, ended.stderr, *outputs])
    written = [json.loads((reports / f"{rank}.json").read_text()) for rank in range(2)]
    return written, ended


def find_differences(plain: Any, watched: Any, path: str = "") -> Iterator[str]:
    """The places at which two documents differ, with both values."""
    if isinstance(plain, dict) and "measured" in plain and isinstance(watched, dict):
        if watched["measured"] > plain["measured"] + plain["tolerance"]:
            yield f"{path}: plain {plain['measured']}, watched {watched['measured']}"
    elif isinstance(plain, dict) and isinstance(watched, dict):
        for key in sorted({*plain, *watched}):
            missing = "nothing"
            yield from find_differences(
                plain.get(key, missing), watched.get(key, missing), f"{path}/{key}"
            )
    elif isinstance(plain, list) and isinstance(watched, list) and len(plain) == len(watched):
        for number, (one, other) in enumerate(zip(plain, watched, strict=True)):
            yield from find_differences(one, other, f"{path}/{number}")
    elif plain != watched:
        yield f"{path}: plain {plain}\n    watched {watched}"


def remove_documented(report: dict[str, Any]) -> None:
    """Takes out of a watched rank's report what hangwatch is documented to add. Raises ValueError if it
    is not there.
    """
    report["threads"]["python"].remove("hangwatch")
    # Before Python 3.14, a thread has the name of the executable.
    report["threads"]["kernel"].remove(Path(sys.executable).name[:15])
    report["threads_after_groups"] -= 1
    files = report["open_files"]
    for suffix in (".ring", ".stacks"):
        files.remove(next(name for name in files if name.endswith(suffix)))
    report["signal_handlers"]["caught"].remove(STACK_DUMP_SIGNAL)
    for name in ("hangwatch", "faulthandler"):
        del report["modules"][name]


@pytest.mark.timeout(700)
def test_watched_equals_plain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    recorder = draw_recorder("watched_equals_plain", choose_seed())
    recorders = {recorder: native.recorder_env(recorder, tmp_path_factory)}
    recorders["checks"] = {
        **native.recorder_env("python", tmp_path_factory),
        "HANGWATCH_CHECKS": "replicas,nonfinite,values",
        "HANGWATCH_CHECK_EVERY": "1",
    }
    with run_server(tmp_path / "server") as server, ThreadPoolExecutor(2) as pool:
        plain_run = pool.submit(run_program, tmp_path / "plain", None, {})
        watched_runs = {
            name: pool.submit(run_program, tmp_path / name, server.url, env, name)
            for name, env in recorders.items()
        }
        plain, plain_job = plain_run.result()
        problems: list[str] = []
        for name, run in watched_runs.items():
            watched, watched_job = run.result()
            for plain_report, report in zip(plain, watched, strict=True):
                remove_documented(report)
                if name == "checks":  # a profile shows the operators of the checks
                    report |= {aspect: plain_report[aspect] for aspect in PROFILE_ASPECTS}
            problems += [f"{name} {line}" for line in find_differences(plain, watched)]
            written = find_differences(clean_output(plain_job), clean_output(watched_job))
            problems += [f"{name} output {line}" for line in written]
        problems += [f"{i['job']}: {i['summary']}" for i in server.get_items("incidents")]
    assert not problems, "\n".join(problems)


def clean_output(ended: job.LaunchedJob) -> dict[str, dict[str, str]]:
    """The different lines that the launcher and each rank wrote, without times, pids and folders."""
    texts = {"launcher": ended.stdout + ended.stderr}
    texts |= {path.name: path.read_text() for path in (ended.folder / "reports").glob("*.out")}
    return {name: clean_lines(text, ended.folder) for name, text in sorted(texts.items())}


def clean_lines(text: str, folder: Path) -> dict[str, str]:
    lines = text.replace(str(folder), "FOLDER").splitlines()
    return {re.sub(r"\d+", "N", line): "written" for line in lines}
