"""`hangwatch analyze`, on dumps of real gloo jobs, on dumps as NCCL writes them, on bundles, and on
files that mean harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pty
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.cli import main
from hangwatch.model.ranks import RankState
from hangwatch.server.core.job_views import RankGroupView, RankView
from hangwatch.server.http import api
from tests.harness import expected
from tests.harness.job import running_job
from tests.harness.processes import clean_environment
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders
from tests.simulation.waiting import wait_until
from tests.unit.hangwatch.flight_recorder.test_cases import CASES
from tests.unit.incident_documents import make_incident
from tests.zoo.peers import SITE_DIR, reading

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=timezone.utc)


def write_dumps(made: Iterable[SyntheticRecorder], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for one in made:
        (folder / f"nccl_trace_rank_{one.rank}").write_bytes(
            pickle.dumps(one.make_dump(), protocol=2)
        )
    return folder


def analyze_incidents(
    capsys: pytest.CaptureFixture[str], *args: str | Path, code: int = 4
) -> list[dict[str, Any]]:
    """The incidents."""
    assert main(["analyze", "--json", *map(str, args)]) == code
    items: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["items"]
    return items


# Whom it accuses depends on whose file it finds first, and a folder has no order.
_ORDERED_ANALYZER = """
import os, sys
walk = os.walk
os.walk = lambda top: ((at, folders, sorted(files)) for at, folders, files in walk(top))
from torch.distributed.flight_recorder.fr_trace import main
for folder in sys.argv[1:]:
    print("=== " + folder, file=sys.stderr)
    try:
        main([folder])
    except Exception as error:
        print(type(error).__name__, error, file=sys.stderr)
"""


def run_torch_analyzer(*folders: Path) -> list[str]:
    """What PyTorch's own analyzer prints of the dumps in each folder."""
    command = [sys.executable, "-c", _ORDERED_ANALYZER, *map(str, folders)]
    ran = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env=clean_environment(),
    )
    return ran.stderr.split("=== ")[1:]


def write_outlier_dumps(folder: Path) -> Path:
    made = make_recorders(4)
    for one in made:
        one.record_call()
        one.record_call(
            "all_reduce" if one.rank else "broadcast", state="scheduled", line=30 + one.rank
        )
    return write_dumps(made, folder)


@pytest.mark.parametrize("name", ["evaluates_alone", "leaves_for_own_code"])
def test_dumps_of_a_real_gloo_job(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = expected.load_expected(name)
    dumps, trigger = tmp_path / "dumps", tmp_path / "now"
    dumps.mkdir()
    env = {
        "PYTHONPATH": str(SITE_DIR),
        "TORCH_FR_DUMP_TEMP_FILE": str(dumps / "rank_"),
        "PEER_DUMP_WHEN": str(trigger),
    }
    with running_job(expected.program_path(name), wanted.ranks, tmp_path, None, env=env) as job:
        assert wait_until(
            lambda: job.planted_at is not None and time.time() > job.planted_at + 3.0, 90.0
        )
        trigger.touch()
        assert wait_until(lambda: len(list(dumps.glob("rank_*"))) == wanted.ranks, 30.0)
    [incident] = analyze_incidents(capsys, dumps)
    assert (incident["kind"], tuple(incident["culprits"])) == (wanted.kind, wanted.culprits)
    assert "KeyError" in run_torch_analyzer(dumps)[0]
    if wanted.where == "calls":
        lines = [
            call["site"]["line"]
            for call in incident["calls"]
            if call["ranks"] == list(wanted.culprits)
        ]
        assert lines == [expected.find_planted_line(name)]


# Whom PyTorch's analyzer accuses: it takes the first rank's call for the right one, and wants what
# may differ to be equal.
ACCUSED_BY_TORCH = {
    "rank 0 is the outlier": (1, 2, 3),
    "an output that its own input does not fit, of two": (1,),
    "most cannot be right": (1, 2),
    "numbers as text, types as one word, no stacks": (1, 2),
    "one has finished what another has only scheduled": (1,),
    "a view of another shape": (1,),
    "uneven all_gather": (1,),
    "another type": (1,),
    "a coalesced call that rank 0 never made": (0,),
}


def test_rank_0_outlier_is_named_where_torch_blames_majority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        write_dumps(CASES[name].build(), tmp_path / name.replace(" ", "_"))
        for name in ACCUSED_BY_TORCH
    ]
    assert [reading.parse_analyzer(text) for text in run_torch_analyzer(*folders)] == list(
        ACCUSED_BY_TORCH.values()
    )
    for name, folder in zip(ACCUSED_BY_TORCH, folders, strict=True):
        case = CASES[name]
        incidents = analyze_incidents(capsys, folder, code=4 if case.kind is not None else 0)
        assert [(item["kind"], tuple(item["culprits"])) for item in incidents] == (
            [(case.kind, case.culprits)] if case.kind else []
        )


def test_text_shows_calls_side_by_side_and_unknowns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_outlier_dumps(tmp_path)
    (folder / "nccl_trace_rank_3").unlink()
    (folder / "README").write_text("not a dump")
    assert main(["analyze", str(folder)]) == 4
    out, err = capsys.readouterr()
    assert "rank 0 called broadcast where ranks 1-2 called all_reduce" in out
    assert "/home/me/train.py:30" in out
    assert "no dump of rank 3: that is missing evidence, not a sign of death" in err


def test_json_dumps_and_single_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_recorders(3)
    files = [tmp_path / f"rank{one.rank}.json" for one in made]
    for one, file in zip(made, files, strict=True):
        one.record_call()
        if one.rank:
            one.record_call(state="started")
        file.write_text(json.dumps(one.make_dump()))
    assert analyze_incidents(capsys, *files)[0]["culprits"] == [0]


def test_healthy_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_recorders(2)
    for one in made:
        one.record_call()
    folder = write_dumps(made, tmp_path)
    assert analyze_incidents(capsys, folder, code=0) == []
    assert main(["analyze", str(folder)]) == 0
    assert "no hang in 2 dumps" in capsys.readouterr().err


class PickleExploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_malicious_pickle_is_refused(
    protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SECURITY.md: "refuses a pickle that would import or call anything, before it executes any of
    it".
    """
    harmed, file = tmp_path / "harmed", tmp_path / "rank_0"
    file.write_bytes(
        pickle.dumps(
            {"version": "2.10", "pg_config": {}, "entries": [PickleExploit(harmed)]},
            protocol=protocol,
        )
    )
    assert main(["analyze", str(file)]) == 1
    err = capsys.readouterr().err
    assert f"{file}: it would import" in err
    assert "was not executed" in err
    assert not harmed.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a pickle"),
        (b"\x80\x02}q\x00X\x07\x00", "cannot be read as a pickle"),
        (b"\x80\x02Pabc\n.", "refers to an external object"),
        (b"\x80\x02N\x94r\xff\xff\xff\x7f.", "cannot be read as a pickle"),
        (b"PK\x03\x04 and no more", "not a hangwatch bundle"),
        (b'{"version": "2.10", "pg_con', "cut off, or not JSON"),
        (b'{"rows": []}', "no 'version'"),
    ],
)
def test_unrelated_files(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rank_0"
    file.write_bytes(content)
    assert main(["analyze", str(file)]) == 1
    assert f"{file}: " in (err := capsys.readouterr().err)
    assert message in err


def test_damaged_files_are_reported_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_outlier_dumps(tmp_path)
    whole = (folder / "nccl_trace_rank_3").read_bytes()
    cut_at = whole.index(b"entries") + 3  # within a string
    (folder / "nccl_trace_rank_3").write_bytes(whole[:cut_at])
    (folder / "stdout_4").write_text("a line of a log\n")
    (folder / "events.1700000000123").write_bytes(whole)
    assert main(["analyze", "--json", str(folder)]) == 4
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert [item["culprits"] for item in answer["items"]] == [[0]]
    assert "nccl_trace_rank_3: it cannot be read as a pickle: it is cut off" in err
    assert "stdout_4: it is neither a pickle nor JSON" in err
    assert "events.1700000000123: its name must end with its rank" in err
    assert "no dump of rank 3: that is missing evidence" in err
    assert len(answer["notes"]) == 4
    (folder / "nccl_trace_rank_2").write_bytes(
        pickle.dumps(PickleExploit(tmp_path / "harmed"), protocol=2)
    )
    assert main(["analyze", str(folder)]) == 1
    assert "nccl_trace_rank_2: it would import" in capsys.readouterr().err
    assert not (tmp_path / "harmed").exists()


def test_analysis_can_be_interrupted_and_shows_progress(tmp_path: Path) -> None:
    """The command runs on a pseudo-terminal."""
    folder = write_dumps(make_recorders(64), tmp_path / "dumps")
    os.mkfifo(folder / "waits_64")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    command = [
        sys.executable,
        "-P",
        "-c",
        "import sys; from hangwatch.agent.cli import main; sys.exit(main())",
        "analyze",
    ]
    files = [*(folder / f"nccl_trace_rank_{rank}" for rank in range(64)), folder / "waits_64"]
    ran = subprocess.Popen(
        [*command, *map(str, files)],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=clean_environment(),
    )
    shown = bytearray()

    def stop_at_last() -> bool:
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(ours, 4096))
        return b"reading files: 64 of 65" in shown

    try:
        assert wait_until(stop_at_last, 30.0), shown
        ran.send_signal(signal.SIGINT)
        assert ran.wait(10.0) == 130
    finally:
        ran.kill()
        ran.wait()
        os.close(ours)
        os.close(theirs)


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path / "nowhere")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["analyze", str(tmp_path)]) == 1
    assert "no dump whose name ends with a rank" in capsys.readouterr().err
    write_dumps(make_recorders(1), tmp_path / "a")
    write_dumps(make_recorders(1), tmp_path / "b")
    assert main(["analyze", str(tmp_path)]) == 1
    assert "both of rank 0" in capsys.readouterr().err
    assert main(["analyze", str(tmp_path / "a"), "--export", str(tmp_path / "x")]) == 2
    with pytest.raises(SystemExit) as left:
        main(["analyze"])
    assert left.value.code == 2


def write_bundle(
    path: Path, outlier: int | None, *, op: str = "all_gather_into_tensor", peer: int | None = None
) -> Path:
    """A bundle of a job of three, in which one rank broadcasts, or rank 1 never came."""
    world = [0, 1, 2]
    inside = [rank for rank in world if rank != (1 if outlier is None else outlier)]
    call = {"seq": 8, "shapes": [[4]], "dtype": "float32"}
    calls: list[dict[str, Any]] = [{**call, "ranks": inside, "op": op, "peer": peer}]
    if outlier is not None:
        calls.append({**call, "ranks": [outlier], "op": "broadcast"})
    incident = make_incident(
        id="01J", job="run7", attempt=0, kind="mismatch" if outlier is not None else "missing_rank", severity="alert", status="resolved",
        onset_at=NOW, opened_at=NOW, resolved_at=NOW, summary="what happened", advice="what to do", culprits=[1 if outlier is None else outlier],
        waiting=inside, group={"name": "0", "desc": "default_pg", "ranks": world}, seq=8, calls=calls,
    )  # fmt: skip
    ranks = [
        RankView(
            job="run7", attempt=0, rank=rank, state=RankState.WAITING,
            groups=[
                RankGroupView(
                    name="0", desc="default_pg", ranks=world, entered=8 if rank in (*inside, outlier) else 7, op=op,
                    completed=7 if peer is None or rank not in inside else 8,
                )
            ],
        )
        for rank in world
    ]  # fmt: skip
    path.write_bytes(api.build_archive(incident, ranks))
    return path


def test_bundle_shows_server_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "run7.zip", outlier=2)
    [incident] = analyze_incidents(capsys, tmp_path / "run7.zip")
    assert (incident["id"], incident["culprits"], incident["summary"]) == (
        "01J",
        [2],
        "what happened",
    )
    assert main(["analyze", str(tmp_path)]) == 4
    assert "what happened" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("photo.txt", "")
    assert main(["analyze", str(tmp_path / "other.zip")]) == 1


def test_torchs_analyzer_reads_exported_bundles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operations that it does not know are left out, with a remark."""
    made = {
        "never_came": write_bundle(tmp_path / "1.zip", None),
        "another_call": write_bundle(tmp_path / "2.zip", 2),
        "own_call": write_bundle(tmp_path / "3.zip", None, op="my_nvshmem_put"),
        "message": write_bundle(tmp_path / "4.zip", None, op="recv", peer=1),
    }
    left_out = []
    for name, path in made.items():
        assert main(["analyze", str(path), "--export", str(tmp_path / name)]) == 4
        left_out.append(
            re.findall(
                "left out, since PyTorch's analyzer does not support them: (.*)",
                capsys.readouterr().err,
            )
        )
    assert left_out == [[], [], ["my_nvshmem_put"], ["recv"]]
    said = run_torch_analyzer(*(tmp_path / name for name in made))
    assert not re.findall(r"^\w+(?:Error|Exception) .*", "".join(said), re.MULTILINE)
    assert [reading.parse_analyzer(text) for text in said] == [(1,), (2,), (), ()]
    assert [
        analyze_incidents(capsys, tmp_path / name)[0]["culprits"]
        for name in ("never_came", "another_call")
    ] == [[1], [2]]
