"""HANGWATCH_CHECKS on a real job: healthy results are examined and open no incident; a flipped bit and
a NaN are traced to their ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hangwatch.agent.node.discovery import rings
from hangwatch.model.calls import Call
from hangwatch.ring import checks
from hangwatch.ring.layout import CheckFlag
from tests.harness.job import LaunchedJob, running_job
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).with_name("checks_program.py")
RANKS = 3
# Every call is sampled, so that it is certain which ones are.
ENV = {"HANGWATCH_CHECKS": "replicas,nonfinite,values", "HANGWATCH_CHECK_EVERY": "1"}


def test_checks_find_divergence_and_nan(tmp_path: Path) -> None:
    """SECURITY.md: "`HANGWATCH_CHECKS=values` records statistics of tensors"."""
    with (
        running_server(tmp_path / "server") as server,
        running_job(PROGRAM, RANKS, tmp_path, server.url, env=ENV, args=[str(tmp_path)]) as job,
    ):
        assert wait_until(
            lambda: all((tmp_path / f"talked{rank}").exists() for rank in range(RANKS)), 90.0
        ), job.stderr
        examined = [entries for _, entries in sorted(read_checks(job).items())]
        check_results(examined)
        check_values(examined)
        assert _list_findings(server) == {}
        (tmp_path / "go").touch()
        assert wait_until(lambda: len(_list_findings(server)) == 2, 20.0), (
            f"{_list_findings(server)}\n{job.stderr}"
        )
        flipped, spoilt = (
            _list_findings(server)["replica_divergence"],
            _list_findings(server)["nonfinite"],
        )
        for incident, culprit in ((flipped, 1), (spoilt, 2)):
            assert (incident["severity"], incident["status"], incident["culprits"]) == (
                "warning",
                "open",
                [culprit],
            ), incident
            assert incident["site"]["function"] == "train" and incident["site"]["file"] == str(
                PROGRAM
            )
            assert (
                incident["calls"][-1]["ranks"] == [culprit]
                and incident["calls"][-1]["op"] == "all_reduce"
            )
        assert [c["ranks"] for c in flipped["calls"]] == [[0, 2], [1]]
        assert (
            "rank 2 put NaN into all_reduce" in spoilt["summary"] and "Inf" not in spoilt["summary"]
        )
        assert "hangwatch: exam" not in job.stderr


def _list_findings(server: Server) -> dict[str, dict[str, Any]]:
    incidents = [
        server.get(f"incidents/{item['id']}") for item in server.get_items("incidents", job="job")
    ]
    assert len({i["kind"] for i in incidents}) == len(incidents)
    return {i["kind"]: i for i in incidents}


ExaminedCalls = list[tuple[Call, checks.CheckEntry]]


def read_checks(job: LaunchedJob) -> dict[int, ExaminedCalls]:
    """The entries of the rings' tables with their calls, by rank."""
    checks_by_rank = {}
    (folder,) = {path.parent for path in job.run_dir.rglob("*.ring")}
    for file in rings.find_ring_files(folder)[0]:
        reader = file.open_reader()
        entries = checks.read_check_entries(reader)[0]
        checks_by_rank[reader.read_snapshot(0).identity["rank"]] = [
            (checks.call_from_entry(reader, e, 0), e) for e in entries
        ]
    assert sorted(checks_by_rank) == list(range(RANKS))
    return checks_by_rank


def check_results(examined: list[ExaminedCalls]) -> None:
    """Equal on all ranks, of every kind of call, and of no call whose caller may already have
    changed it.
    """
    sums = [
        {(e.uid, e.seq): e.checksum for _, e in entries if e.flags & CheckFlag.CHECKSUM}
        for entries in examined
    ]
    assert sums[0] == sums[1] == sums[2]
    results = [
        [c.signature for c, e in entries if e.flags & CheckFlag.CHECKSUM] for entries in examined
    ]
    (calls,) = {tuple((s.op, s.shapes, s.dtype) for s in signatures) for signatures in results}
    ops = [op for op, _, _ in calls]
    assert {"all_gather", "all_gather_into_tensor", "broadcast", "all_reduce"} == set(ops)
    assert ("all_reduce", ((5,),), "int64") in calls and ("all_reduce", ((9,),), "float16") in calls
    assert ("all_reduce", ((3000,),), "float32") not in calls
    buckets = [
        c
        for entries in examined
        for c, e in entries
        if e.flags & CheckFlag.CHECKSUM and c.site and c.site.function == "train"
    ]
    assert len(buckets) == 5 * RANKS, "the bucket of the reducer, at each step"
    assert [e.flags for _, e in examined[1] if e.flags & CheckFlag.NONFINITE] == [
        CheckFlag.NONFINITE | CheckFlag.OUTPUT | CheckFlag.SCALED
    ], "an overflow in 16 bits, and nothing else"


def check_values(examined: list[ExaminedCalls]) -> None:
    for rank, entries in enumerate(examined):
        checks_by_shape = {
            c.signature.shapes: e
            for c, e in entries
            if e.flags & CheckFlag.VALUES and not e.flags & CheckFlag.OUTPUT
        }
        assert checks_by_shape[((5,),)].stats == (1.0, 1.0, 1.0, 5**0.5)
        assert checks_by_shape[((1,),)].nan == (rank > 0), (
            "Infs are counted, and excluded from the statistics"
        )
