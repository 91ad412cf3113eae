"""`hangwatch trace` and `hangwatch record` on a real job under torchrun, over a real server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.cli import main
from tests.harness.job import running_job
from tests.harness.processes import clean_environment
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).with_name("live_program.py")
COMMAND = str(Path(sys.executable).with_name("hangwatch"))
CapturedOutput = pytest.CaptureFixture[str]


def start_command(server: Server, folder: Path, *command: str) -> subprocess.Popen[str]:
    env = clean_environment(HANGWATCH_URL=server.url)
    return subprocess.Popen(
        [COMMAND, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=folder,
    )


def finish_command(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out, err


def test_trace_and_record(
    tmp_path: Path, capsys: CapturedOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_server(tmp_path / "server") as server,
        running_job(PROGRAM, 2, tmp_path / "job", server.url, name="live") as job,
    ):
        monkeypatch.setenv("HANGWATCH_URL", server.url)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.chdir(tmp_path)

        def both_ranks_call() -> bool:
            return (
                sum(
                    any(g["entered"] > 20 for g in rank["groups"])
                    for rank in server.get_items("ranks", job="live")
                )
                == 2
            )

        assert wait_until(both_ranks_call, 60), job.stderr
        traced = start_command(
            server,
            tmp_path,
            "trace",
            "--rank",
            "0",
            "--op",
            "all_reduce",
            "--seconds",
            "2",
            "--json",
        )
        endless = start_command(server, tmp_path, "trace", "--rank", "0-1")
        recorded = start_command(
            server, tmp_path, "record", "--rank", "1", "--seconds", "2", "--out", "files"
        )
        assert recorded.stderr is not None and any(
            "recording rank 1" in line for line in recorded.stderr
        )
        check_refusals(capsys)
        check_calls(finish_command(traced)[0])
        check_times(*finish_command(recorded), tmp_path / "files")
        endless.send_signal(signal.SIGINT)
        out, err = finish_command(endless)
        assert "tracing ranks 0-1, until Ctrl-C" in err
        assert "broadcast [64] float32 root 1  the pair" in out and "calls  op" in out
        stopped = start_command(
            server, tmp_path, "record", "--rank", "0", "--seconds", "60", "--out", "files"
        )
        assert stopped.stderr is not None
        assert any("recording rank 0" in line for line in stopped.stderr)
        check_one_group(capsys)
        stopped.send_signal(signal.SIGINT)
        out, err = finish_command(stopped)
        assert "of 60 s: it was stopped" in out and "speedscope" in err
        share = re.search(r"(\d+) % in step", out)
        assert share is not None and int(share[1]) >= 90, out
        assert server.get_items("incidents") == [], "tracing and recording open no incident"


def check_calls(out: str) -> None:
    *lines, counts = map(json.loads, out.splitlines())
    calls: list[dict[str, Any]] = [line for line in lines if line["type"] == "call"]
    assert len(calls) > 10 and lines == calls
    kinds = {(c["op"], c["rank"], c["dtype"], c["reduce_op"], str(c["shapes"])) for c in calls}
    assert kinds == {("all_reduce", 0, "float32", "sum", "[[64]]")}
    assert {c["group"]["desc"] for c in calls} == {"default_pg"}
    text = PROGRAM.read_text().splitlines()
    for call in calls:
        site = call["site"]
        assert (Path(site["file"]), site["function"]) == (PROGRAM, "step") and "all_reduce" in text[
            site["line"] - 1
        ]
    seqs = [c["seq"] for c in calls]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs))), "no call is missing or repeated"
    times = [datetime.fromisoformat(c["at"].replace("Z", "+00:00")) for c in calls]
    assert times == sorted(times) and (times[-1] - times[0]).total_seconds() < 2.5
    durations = [c["within_s"] for c in calls if c["within_s"] is not None]
    assert (
        len(durations) > 0.8 * len(calls) and 0.01 < sorted(durations)[len(durations) // 2] < 1
    ), "rank 0 waits for 20 ms in each"
    assert counts == {
        "type": "counts",
        "items": [{"op": "all_reduce", "rank": 0, "calls": len(calls)}],
        "missed": 0,
        "ended": "done",
    }


def check_times(out: str, err: str, folder: Path) -> None:
    heading, sentence = out.splitlines()[:2]
    assert heading.startswith("rank 1 · MainThread · 2.0 s at 100 Hz · ")
    share, rest = sentence.split(" % in ", 1)
    assert int(share) > 50 and rest.startswith("crunch (live_program.py:")
    assert "> step" in out and "> crunch" in out
    (picture,), (profile,) = list(folder.glob("*.svg")), list(folder.glob("*.speedscope.json"))
    assert str(picture.name) in err and str(profile.name) in err
    titles = [
        t.text or "" for t in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert any(title.startswith(f"crunch {PROGRAM}:") for title in titles)
    speedscope = json.loads(profile.read_text())
    assert speedscope["$schema"].endswith("file-format-schema.json")
    main_thread = next(p for p in speedscope["profiles"] if p["name"] == "rank 1, MainThread")
    assert len(main_thread["samples"]) == len(main_thread["weights"])
    names = {
        speedscope["shared"]["frames"][n]["name"]
        for sample in main_thread["samples"]
        for n in sample
    }
    assert {"main", "step", "crunch"} <= names


def check_refusals(capsys: CapturedOutput) -> None:
    """Invalid requests are refused with the valid choices and an exit code."""
    for command, expected_code, why in (
        (["record", "--rank", "0", "--seconds", "1"], 1, "a host records one process at a time"),
        (["trace", "--rank", "7"], 1, "job 'live' has no rank 7; it has 0-1"),
        (["trace", "--rank", "0", "--job", "other"], 1, "unknown job 'other'; known jobs: live"),
        (["trace", "--rank", "0", "--group", "tp"], 1, "known groups: default_pg, the pair"),
        (["trace", "--rank", "0", "--seconds", "0"], 2, "a number of seconds above 0"),
        (["trace"], 2, "--rank"),
        (["trace", "--rank", "0", "--url", "http://127.0.0.1:9"], 3, "hangwatch-server"),
        (["record", "--rank", "1,9"], 1, "job 'live' has no rank 9"),
        (["record", "--rank", "1", "--seconds", "301"], 2, "1 to 300"),
        (
            ["record", "--rank", "1", "--seconds", "300", "--rate", "1000"],
            2,
            "more than 30000 samples",
        ),
    ):
        try:
            exit_code = main(command)
        except SystemExit as error:
            exit_code = int(str(error.code))
        assert (exit_code, why in capsys.readouterr().err) == (expected_code, True), command


def check_one_group(capsys: CapturedOutput) -> None:
    """A group selected by its description, with values that are not recorded."""
    assert (
        main(["trace", "--rank", "1", "--group", "the pair", "--seconds", "0.5", "--values"]) == 0
    )
    said = capsys.readouterr()
    assert "broadcast" in said.out and "all_reduce" not in said.out
    assert "HANGWATCH_CHECKS=values" in said.err
