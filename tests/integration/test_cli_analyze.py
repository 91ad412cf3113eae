"""`hangwatch analyze`, on dumps of real gloo jobs, on dumps as NCCL writes them, on bundles, and on files that mean harm."""

from __future__ import annotations

import json
import os
import pickle
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
from server import bundle, schema
from tests.harness import expected
from tests.harness.job import running
from tests.harness.processes import environment, eventually
from tests.unit.recorders import Recorder, recorders
from tests.zoo.peers import SITE, reading

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=timezone.utc)


def written(made: Iterable[Recorder], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for one in made:
        (folder / f"nccl_trace_rank_{one.rank}").write_bytes(pickle.dumps(one.dump(), protocol=2))
    return folder


def told(capsys: pytest.CaptureFixture[str], *args: str | Path, code: int = 4) -> list[dict[str, Any]]:
    """The incidents."""
    assert main(["analyze", "--json", *map(str, args)]) == code
    items: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["items"]
    return items


# Whom it accuses depends on whose file it finds first, and a folder has no order.
_IN_ORDER = """
import os, sys
walk = os.walk
os.walk = lambda top: ((at, folders, sorted(files)) for at, folders, files in walk(top))
from torch.distributed.flight_recorder.fr_trace import main
main(sys.argv[1:])
"""


def torch_says(folder: Path) -> str:
    command = [sys.executable, "-c", _IN_ORDER, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    return ran.stdout + ran.stderr


def odd_rank_0(folder: Path) -> Path:
    made = recorders(4)
    for one in made:
        one.call()
        one.call("all_reduce" if one.rank else "broadcast", state="scheduled", line=30 + one.rank)
    return written(made, folder)


@pytest.mark.parametrize("name", ["evaluates_alone", "leaves_for_own_code"])
def test_dumps_of_a_real_gloo_job(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = expected.load(name)
    dumps, trigger = tmp_path / "dumps", tmp_path / "now"
    dumps.mkdir()
    env = {"PYTHONPATH": str(SITE), "TORCH_FR_DUMP_TEMP_FILE": str(dumps / "rank_"), "PEER_DUMP_WHEN": str(trigger)}
    with running(expected.program(name), wanted.ranks, tmp_path, None, env=env) as job:
        assert eventually(lambda: job.planted_at is not None and time.time() > job.planted_at + 3.0, 90.0)
        trigger.touch()
        assert eventually(lambda: len(list(dumps.glob("rank_*"))) == wanted.ranks, 30.0)
    [found] = told(capsys, dumps)
    assert (found["kind"], tuple(found["culprits"])) == (wanted.kind, wanted.culprits)
    if wanted.where == "calls":
        lines = [call["site"]["line"] for call in found["calls"] if call["ranks"] == list(wanted.culprits)]
        assert lines == [expected.planted_line(name)]


def test_where_torchs_analyzer_accuses_the_majority_rank_0_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = odd_rank_0(tmp_path / "dumps")
    assert reading.analyzer(torch_says(folder)) == (1, 2, 3)
    [found] = told(capsys, folder)
    assert (found["kind"], found["culprits"], found["seq"]) == ("mismatch", [0], 2)


def test_the_text_shows_the_calls_side_by_side_and_says_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = odd_rank_0(tmp_path)
    (folder / "nccl_trace_rank_3").unlink()
    (folder / "README").write_text("not a dump")
    assert main(["analyze", str(folder)]) == 4
    out, err = capsys.readouterr()
    assert "rank 0 called broadcast where ranks 1-2 called all_reduce" in out
    assert "/home/me/train.py:30" in out
    assert "no dump of rank 3: that is missing evidence, not a sign of death" in err


def test_json_dumps_and_single_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorders(3)
    files = [tmp_path / f"rank{one.rank}.json" for one in made]
    for one, file in zip(made, files, strict=True):
        one.call()
        if one.rank:
            one.call(state="started")
        file.write_text(json.dumps(one.dump()))
    assert told(capsys, *files)[0]["culprits"] == [0]


def test_healthy_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = recorders(2)
    for one in made:
        one.call()
    folder = written(made, tmp_path)
    assert told(capsys, folder, code=0) == []
    assert main(["analyze", str(folder)]) == 0
    assert "no hang in 2 dumps" in capsys.readouterr().err


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_runs_nothing(protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmed, file = tmp_path / "harmed", tmp_path / "rank_0"
    file.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [Harm(harmed)]}, protocol=protocol))
    assert main(["analyze", str(file)]) == 1
    err = capsys.readouterr().err
    assert f"{file}: it wants to import" in err
    assert "was not run" in err
    assert not harmed.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a pickle"),
        (b"\x80\x02}q\x00X\x07\x00", "cannot be read as a pickle"),
        (b"\x80\x02Pabc\n.", "refers to an object outside"),
        (b"\x80\x02N\x94r\xff\xff\xff\x7f.", "cannot be read as a pickle"),
        (b"PK\x03\x04 and no more", "no bundle of hangwatch's"),
        (b'{"version": "2.10", "pg_con', "cut off, or no JSON"),
        (b'{"rows": []}', "no 'version'"),
    ],
)
def test_files_that_are_something_else(content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rank_0"
    file.write_bytes(content)
    assert main(["analyze", str(file)]) == 1
    assert f"{file}: " in (err := capsys.readouterr().err)
    assert message in err


def test_what_was_typed_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path / "nowhere")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["analyze", str(tmp_path)]) == 1
    assert "no dump whose name ends with a rank" in capsys.readouterr().err
    written(recorders(1), tmp_path / "a")
    written(recorders(1), tmp_path / "b")
    assert main(["analyze", str(tmp_path)]) == 1
    assert "both of rank 0" in capsys.readouterr().err
    assert main(["analyze", str(tmp_path / "a"), "--export", str(tmp_path / "x")]) == 2
    with pytest.raises(SystemExit) as left:
        main(["analyze"])
    assert left.value.code == 2


def made_bundle(path: Path, odd: int | None) -> Path:
    """Of a job of three, where one rank broadcasts, or where rank 1 never came."""
    world = [0, 1, 2]
    inside = [rank for rank in world if rank != (1 if odd is None else odd)]
    calls = [schema.CallClass(ranks=inside, seq=8, op="all_gather_into_tensor", shapes=[[4]], dtype="float32")]
    if odd is not None:
        calls.append(schema.CallClass(ranks=[odd], seq=8, op="broadcast", shapes=[[4]], dtype="float32"))
    incident = schema.Incident(
        id="01J", job="run7", attempt=0, kind="mismatch" if odd is not None else "missing_rank", severity="alert", status="resolved",
        onset_at=NOW, opened_at=NOW, resolved_at=NOW, summary="what happened", advice="what to do", culprits=[1 if odd is None else odd],
        waiting=inside, group=schema.GroupName(name="0", desc="default_pg", ranks=world), seq=8, calls=calls,
    )  # fmt: skip
    ranks = [
        schema.Rank(
            job="run7", attempt=0, rank=rank, state="waiting",
            groups=[schema.RankGroup(name="0", desc="default_pg", ranks=world, entered=8 if rank in (*inside, odd) else 7, completed=7)],
        )
        for rank in world
    ]  # fmt: skip
    path.write_bytes(bundle.pack(incident, ranks))
    return path


def test_a_bundle_is_told_as_the_server_told_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_bundle(tmp_path / "run7.zip", odd=2)
    [found] = told(capsys, tmp_path / "run7.zip")
    assert (found["id"], found["culprits"], found["summary"]) == ("01J", [2], "what happened")
    assert main(["analyze", str(tmp_path)]) == 4
    assert "what happened" in capsys.readouterr().out
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("photo.txt", "")
    assert main(["analyze", str(tmp_path / "other.zip")]) == 1


@pytest.mark.parametrize(("odd", "culprits"), [(None, (1,)), (2, (2,))])
def test_torchs_analyzer_reads_an_exported_bundle(
    odd: int | None, culprits: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    assert main(["analyze", str(made_bundle(tmp_path / "run7.zip", odd)), "--export", str(exported)]) == 4
    assert reading.analyzer(torch_says(exported)) == culprits
    capsys.readouterr()
    [again] = told(capsys, exported)
    assert tuple(again["culprits"]) == culprits
