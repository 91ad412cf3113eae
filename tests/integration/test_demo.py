"""`hangwatch demo` names the planted line, and leaves nothing running or on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from hangwatch.agent.cli import main
from hangwatch.agent.cli.commands import demo
from tests.simulation.waiting import wait_until

LIMIT_S = 120.0  # the limit on a busy machine; alone it takes about 15


@contextmanager
def start_demo(tmp_path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a user starts it, with all that it writes and all that runs of it marked by
    `tmp_path`.
    """
    env = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "hangwatch.agent.cli", "demo", *options]
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        for pid in find_remaining_processes(tmp_path):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=10)


def find_remaining_processes(tmp_path: Path) -> list[int]:
    """Processes that carry the mark in their environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(tmp_path).encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:  # it is gone
            continue
    return pids


def wait_for_text(tmp_path: Path, text: str) -> str:
    """Stderr, once it has `text`."""
    stderr = tmp_path / "err"
    assert wait_until(lambda: text in stderr.read_text(), LIMIT_S), (
        f"no {text!r} in:\n{stderr.read_text()}"
    )
    return stderr.read_text()


def assert_cleaned_up(tmp_path: Path) -> None:
    assert find_remaining_processes(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["err"]


def test_demo_names_planted_line_and_cleans_up(tmp_path: Path) -> None:
    with start_demo(tmp_path) as process:
        out, _ = process.communicate(timeout=LIMIT_S)
        said = (tmp_path / "err").read_text()
        assert process.returncode == 0, said
        assert_cleaned_up(tmp_path)
    planted = re.search(r"right: the planted line is (train\.py:\d+)", said)
    assert planted, said
    assert out.startswith("ALERT  missing_rank · job demo")
    assert "rank 2" in out.splitlines()[1]
    assert re.search(rf"^  > \S*load_batch\s.*{re.escape(planted[1])}$", out, re.MULTILINE)
    assert "\x1b" not in out
    for progress in (
        "server up: http://127.0.0.1:",
        "training: step 1 ",
        "rank 2 now hangs",
        "everything has ended and is cleaned up",
    ):
        assert progress in said


def test_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    with start_demo(tmp_path) as process:
        wait_for_text(tmp_path, "training: step 1 ")
        assert (
            len(find_remaining_processes(tmp_path)) > 6
        )  # itself, the server, torchrun, four ranks, the node agent
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        assert_cleaned_up(tmp_path)
    assert out == ""
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_kept_demo_can_be_explored_until_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_demo(tmp_path, "--keep", "--json") as process:
        page = re.search(
            r"open (http://\S+/incidents/\w+),",
            wait_for_text(tmp_path, "everything keeps running"),
        )
        assert page
        answer = httpx.get(page[1], headers={"Accept": "text/html"}, trust_env=False)
        assert answer.status_code == 200
        assert "load_batch" in answer.text
        assert_commands_see_it(page[1].partition("/incidents/")[0], capsys)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert_cleaned_up(tmp_path)
    incident = json.loads(out)
    assert (incident["kind"], incident["culprits"]) == ("missing_rank", [2])


def assert_commands_see_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands against the real server, with a real hang on it."""
    assert main(["status", "--url", url]) == 4
    assert capsys.readouterr().out.startswith("demo  stalled  4 ranks: ")
    assert (
        main(
            [
                "incidents",
                "--url",
                url,
                "--job",
                "demo",
                "--status",
                "open",
                "--kind",
                "missing_rank",
            ]
        )
        == 0
    )
    name = capsys.readouterr().out.splitlines()[1].split()[0]
    assert main(["show", name, "--url", url]) == 0
    assert "> Shards.load_batch" in capsys.readouterr().out
    assert main(["dump", "2", "--url", url]) == 0
    assert "> Shards.load_batch" in capsys.readouterr().out
    assert main(["dump", "2,9", "--url", url]) == 1
    assert "job 'demo' has no rank 9" in capsys.readouterr().err
    assert main(["show", "ZZZ", "--url", url]) == 1
    assert "`hangwatch incidents` lists them" in capsys.readouterr().err
    assert main(["status", "--url", url, "--job", "other"]) == 1
    assert "known: demo" in capsys.readouterr().err


def test_missing_dependency_is_named_with_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "REQUIRED_MODULES", ("json", "no_such_module"))
    assert main(["demo"]) == 1
    assert "needs no_such_module: pip install 'hangwatch[demo]'" in capsys.readouterr().err
