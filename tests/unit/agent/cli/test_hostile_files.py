"""Malicious and damaged files are rejected with a clear error, or read. Nothing in them is executed,
and none takes much memory or time.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import pickle
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from hangwatch.agent.cli import main
from hangwatch.agent.cli.commands.analyze import FileError, diagnose_files, read_evidence
from hangwatch.flight_recorder import pickles
from hangwatch.flight_recorder.analysis import analyze_dumps
from hangwatch.flight_recorder.calls import FlightDumpError, parse_dump
from hangwatch.flight_recorder.pickles import HostileError, NotPlainError
from tests.simulation.flight_recorders import SyntheticRecorder, make_recorders
from tests.unit.server.ingest.test_fuzz import (
    FUZZ_SETTINGS,
    JSON_STRATEGY,
    DocumentPath,
    iter_document_paths,
)

HUGE_LENGTH = (10 << 30).to_bytes(8, "little")
EXECUTED: list[str] = []
PLAIN_TYPES = {dict, list, tuple, str, bytes, bytearray, int, float, bool, type(None)}


def record_execution(text: str) -> str:
    EXECUTED.append(text)
    return text


class ReducePayload:
    def __reduce__(self) -> tuple[Any, ...]:
        return record_execution, ("reduced",)


class SetstatePayload:
    def __init__(self) -> None:
        self.x = 1

    def __setstate__(self, state: object) -> None:
        record_execution("built")


HOSTILE_PICKLES = {
    "GLOBAL and REDUCE": (
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
        "would import os.system",
    ),
    "STACK_GLOBAL and REDUCE": (
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        "would import os.system",
    ),
    "INST": (b"(S'true'\nios\nsystem\n.", "would import os.system"),
    "OBJ": (b"(cos\nsystem\nS'true'\no.", "would import os.system"),
    "OBJ of a string": (b"\x80\x02(X\x01\x00\x00\x00ao.", "would call"),
    "REDUCE of a string": (b"\x80\x02X\x01\x00\x00\x00a)R.", "would call"),
    "BUILD": (b"\x80\x02}}b.", "would call"),
    "NEWOBJ": (b"\x80\x02})\x81.", "would call"),
    "NEWOBJ_EX": (b"\x80\x04})}\x92.", "would call"),
    "a persistent id": (b"\x80\x02Pabc\n.", "refers to an external object"),
    "a persistent id on the stack": (b"\x80\x02}Q.", "refers to an external object"),
    "the extension registry": (b"\x80\x02\x82\xf0.", "refers to an external object"),
    "the extension registry, 2": (b"\x80\x02\x83\xf0\x00.", "refers to an external object"),
    "the extension registry, 4": (b"\x80\x02\x84\xf0\x00\x00\x00.", "refers to an external object"),
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
def test_pickle_with_code_execution_is_refused(name: str) -> None:
    data, message = HOSTILE_PICKLES[name]
    with pytest.raises(HostileError, match=message):
        pickles.safe_loads(data)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "made",
    [ReducePayload(), SetstatePayload(), record_execution, Path("x"), {1, 2}, os.stat_result],
)
def test_objects_are_refused_in_every_protocol(made: object, protocol: int) -> None:
    with pytest.raises(NotPlainError):
        pickles.safe_loads(pickle.dumps({"version": "2.10", "entries": [made]}, protocol=protocol))
    assert EXECUTED == []


@pytest.fixture
def registered() -> Iterator[int]:
    copyreg.add_extension(__name__, "record_execution", 240)
    yield 240
    copyreg.remove_extension(__name__, "record_execution", 240)


def test_registered_pickle_extension_is_refused(registered: int) -> None:
    pickled = pickle.dumps(record_execution, protocol=2)
    assert (
        pickle.loads(pickled) is record_execution
    )  # now Python takes it from its cache without calling find_class
    with pytest.raises(HostileError, match="extension registry"):
        pickles.safe_loads(pickled)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_in_every_protocol(protocol: int) -> None:
    shared = [
        1,
        1 << 40,
        -(1 << 63),
        0.5,
        float("inf"),
        True,
        None,
        "é\n",
        "x" * 300,
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        (),
    ]
    data = {"a": shared, "b": [shared] * 300, "c": {str(n): [n] for n in range(5000)}}
    assert pickles.safe_loads(pickle.dumps(data, protocol=protocol)) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02]",
        b"\x80\x02}q\x00X\x07\x00",
        b"\x80\x02X\xff\xff\xff\xff.",
        b"\x80\x04\x8d" + HUGE_LENGTH + b".",
        b"\x80\x04\x8e" + HUGE_LENGTH + b".",
        b"\x80\x05\x96" + HUGE_LENGTH + b".",
        b"\x80\x05\x97.",
        b"\x80\x04\x95" + HUGE_LENGTH + b".",
        b"\x80\x04\x95" + b"\xff" * 8 + b".",
        b"\x80\x02N\x94r\xff\xff\xff\x7f.",
        b"\x80\x02Nr\xff\xff\xff\x0f0.",
        b"Np999999999\n.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
        b"\x80\x02h\x07.",
        b"\x80\x02a.",
        b"\x80\x02(((.",
        b"\x80\x09N.",
        b"a line of a log\n",
        b"\x93NUMPY\x01\x00",
        bytes(1000),
    ],
)
def test_damaged_pickles_and_huge_lengths_are_refused_cheaply(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(NotPlainError):
            pickles.safe_loads(data)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_cut_pickle_is_reported_as_cut_off(protocol: int) -> None:
    values = [1, 300, 1 << 20, 1 << 40, 0.5, "text", "x" * 300, True, (1, 2), {"a": "a"}]
    whole = pickle.dumps({"entries": [*values, values]}, protocol=protocol)
    for size in range(len(whole)):
        with pytest.raises(NotPlainError, match="cut off"):
            pickles.safe_loads(whole[:size])


@pytest.mark.parametrize(
    "argument", [b"I12", b"L12", b"F0.5", b"Vtext", b"S'text'", b"g1", b"p1", b"j\1\0", b"r\1\0\0"]
)
def test_pickle_cut_within_rare_opcode_is_reported_as_cut_off(argument: bytes) -> None:
    with pytest.raises(NotPlainError, match="cut off"):
        pickles.safe_loads(b"\x80\x02" + argument)


@pytest.mark.parametrize("argument", [b"Ix\n", b"r\1\0\0\xff", b"\x8a\x0a" + bytes(10)])
def test_invalid_argument_is_not_reported_as_cut_off(argument: bytes) -> None:
    with pytest.raises(NotPlainError, match="byte 2 is"):
        pickles.safe_loads(b"\x80\x02" + argument + b".")


@FUZZ_SETTINGS
@given(data=st.binary(max_size=60), good=st.booleans(), at=st.integers(0, 3000), cut=st.booleans())
def test_any_bytes_are_rejected_or_loaded_as_plain_data(
    data: bytes, good: bool, at: int, cut: bool
) -> None:
    tried = b"\x80\x04" + data
    if good:
        whole = pickle.dumps(make_dumps()[0].make_dump(), protocol=2)
        tried = whole[:at] if cut else whole[:at] + data + whole[at + len(data) :]
    try:
        loaded = pickles.safe_loads(tried)
    except NotPlainError:
        return
    assert find_types(loaded) <= PLAIN_TYPES
    with contextlib.suppress(FlightDumpError):
        analyze_dumps([parse_dump(0, loaded)])


def find_types(value: object) -> set[type]:
    """The types of a value and of everything in it, which may contain itself."""
    types, visited, pending = set(), set(), [value]
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        types.add(type(current))
        if isinstance(current, dict):
            pending += [*current.keys(), *current.values()]
        elif isinstance(current, (list, tuple)):
            pending += current
    return types


def make_dumps() -> list[SyntheticRecorder]:
    made = make_recorders(3, pair=[0, 1])
    for one in made:
        one.record_call("gather", outputs=[[64]] * 3 if one.rank == 0 else [])
        one.record_coalesced("broadcast", [[4], [5]])
    for one in made[:2]:
        one.record_p2p("send" if one.rank else "recv", 1 - one.rank)
        one.record_call("all_to_all", inputs=[[1], [2]], outputs=[[1], [2]], group="pair")
        one.record_call(state="scheduled")
    return made


GOOD_DUMPS = [json.loads(json.dumps(one.make_dump())) for one in make_dumps()]
DUMP_PATHS = list(iter_document_paths(GOOD_DUMPS))
BOMB_STRATEGY = st.sampled_from(
    [
        [[]] * 9,
        [[1] * 70],
        [1 << 70],
        "[0, 1, 99999999999]",
        "[" * 9000,
        "[0, 0]",
        {"ranks": "[0, 1]"},
        "x" * 9000,
        "nccl:send 0->9",
    ]
)


def replace_parts(good: Any, changes: list[tuple[DocumentPath, Any]]) -> Any:
    """A copy with other things in some places."""
    made = [json.loads(json.dumps(good))]
    for at, new in changes:
        inner: Any = made
        with contextlib.suppress(
            KeyError, IndexError, TypeError
        ):  # an earlier change took the place away
            for key in (0, *at)[:-1]:
                inner = inner[key]
            inner[(0, *at)[-1]] = new
    return made[0]


@FUZZ_SETTINGS
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(DUMP_PATHS), st.one_of(JSON_STRATEGY, BOMB_STRATEGY)),
        min_size=1,
        max_size=4,
    )
)
def test_dumps_with_unexpected_parts_are_refused_or_analyzed(
    changes: list[tuple[DocumentPath, Any]],
) -> None:
    altered = replace_parts(GOOD_DUMPS, changes)
    dumps = []
    for rank, data in enumerate(altered if isinstance(altered, list) else [altered]):
        with contextlib.suppress(FlightDumpError):
            dumps.append(parse_dump(rank, data))
    diagnosis = analyze_dumps(dumps) if dumps else None
    for verdict in diagnosis.verdicts if diagnosis else ():
        assert set(verdict.culprits).isdisjoint(verdict.waiting)


def make_nested_list(width: int, depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made] * width
    return made


@pytest.mark.parametrize("at", [("version",), ("pg_config", "0", "ranks"), ("entries", 0, "profiling_name"), ("entries", 0, "input_sizes"),
                                ("entries", 0, "process_group"), ("entries", 0, "frames"), ("entries",), ("entries", 0, "state"),
                                ("pg_status", "0", "last_enqueued_collective"), ("nccl_comm_state",)])  # fmt: skip
@pytest.mark.parametrize(
    "bomb",
    [make_nested_list(10, 100), make_nested_list(1, 20_000), [make_nested_list(1000, 2)] * 1000],
)
def test_billion_laughs_pickle_is_not_expanded(at: tuple[Any, ...], bomb: list[Any]) -> None:
    data = json.loads(json.dumps(GOOD_DUMPS[0]))
    inner = data
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = bomb
    began = time.process_time()
    with contextlib.suppress(FlightDumpError, pickles.NotPlainError):
        analyze_dumps([parse_dump(0, pickles.safe_loads(make_deep_pickle(data)))])
    assert time.process_time() - began < 2.0


def make_hostile_dump(name: str, rank: int) -> dict[str, Any]:
    """A dump of a few megabytes at most, on which the analysis took from half a minute to days."""
    group = {"0": {"ranks": [0, 1]}}
    if name == "members":  # each group has the others' list of members, which is in the file once
        text = str(list(range(1 << 17)))
        return make_dump([{}], {str(number): {"ranks": text} for number in range(2000)})
    if name == "large_group":
        return make_dump([{}], {"0": {"ranks": list(range(60_000))}})
    if name == "renewed_groups":
        return make_dump([{"pg_id": number} for number in range(30_000)], group)
    if name == "channels":
        entries = [
            {"profiling_name": f"nccl:send {rank}->{number + 2}"} for number in range(12_000)
        ]
        return make_dump(entries, {"0": {"ranks": list(range(12_002))}})
    assert name == "channels_of_groups"
    other = 1 - rank
    messages = [
        {
            "process_group": [str(number), ""],
            "pg_id": number,
            "profiling_name": f"nccl:recv {rank}<-{other}",
        }
        for number in range(6000)
    ]
    return make_dump(messages, {str(number): {"ranks": [0, 1]} for number in range(6000)})


def make_dump(entries: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    common = {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "state": "scheduled",
    }
    numbered = [
        {"record_id": number, "collective_seq_id": number + 1, "p2p_seq_id": number + 1}
        for number in range(len(entries))
    ]
    made = [common | first | second for first, second in zip(numbered, entries, strict=True)]
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": made}


@pytest.mark.parametrize(
    "name", ["members", "large_group", "renewed_groups", "channels", "channels_of_groups"]
)
def test_hostile_dumps_are_analyzed_or_refused_in_seconds(name: str, tmp_path: Path) -> None:
    """SECURITY.md: "files that would take more memory or time than real ones"."""
    for rank in (0, 1):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(make_hostile_dump(name, rank)))
        assert (tmp_path / f"trace_{rank}").stat().st_size < 4 << 20
    began = time.process_time()
    with contextlib.suppress(FileError):
        diagnose_files([tmp_path])
    assert time.process_time() - began < 10.0


def test_groups_of_all_ranks_of_a_large_job_are_read_once() -> None:
    """Each dump of 100,000 ranks lists them three times, and those of a group of every eighth rank."""
    all_ranks, some_ranks = (str(list(range(0, 100_000, step))) for step in (1, 8))
    config = {str(number): {"ranks": all_ranks} for number in range(3)}
    dump = make_dump([{}], {**config, "3": {"ranks": some_ranks}})
    first, second = (parse_dump(rank, json.loads(json.dumps(dump))) for rank in (0, 8))
    assert [len(members) for members in first.members.values()] == [100_000] * 3 + [12_500]
    assert len({id(members) for d in (first, second) for members in d.members.values()}) == 2


def test_tuples_are_followed_for_seconds_at_most() -> None:
    began = time.process_time()
    with pytest.raises(pickles.NotPlainError, match="so many values"):
        pickles.safe_loads(b"\x80\x02](" + b"N" * (40 << 20) + b"e\x85.")
    assert time.process_time() - began < 20.0


def make_shared_tuples(depth: int, *, is_key: bool) -> bytes:
    """A dictionary with a tuple of two equal tuples of two equal tuples, and so on."""
    tuples = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(depth))
    item = b"h%c" % depth
    pair = item + b"K\x01" if is_key else b"K\x01" + item
    return b"\x80\x02}(K\x00](" + tuples + b"e" + pair + b"u."


@pytest.mark.parametrize("is_key", [True, False])
def test_pickle_of_shared_tuples_is_refused(is_key: bool) -> None:
    """Hashing the key would not end."""
    assert pickles.safe_loads(make_shared_tuples(5, is_key=is_key))
    with pytest.raises(pickles.NotPlainError, match=r"a tuple of more than 10,000 values"):
        pickles.safe_loads(make_shared_tuples(60, is_key=is_key))


def test_bundle_with_too_many_values_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("incident.json", b"[" + b"[]," * (1 << 24) + b"[]]")
        archive.writestr("ranks.json", b"[]")
    with pytest.raises(FileError, match=r"more than 16 million values"):
        read_evidence([path])


def make_deep_pickle(data: object) -> bytes:
    """A pickle of data that is nested deeper than Python's own pickler goes."""
    made, tasks = bytearray(b"\x80\x02"), [("put", data)]
    numbers: dict[int, int] = {}
    while tasks:
        what, value = tasks.pop()
        if what == "raw":
            made += value  # type: ignore[arg-type]
        elif isinstance(value, (list, tuple, dict)) and id(value) in numbers:
            made += b"j" + numbers[id(value)].to_bytes(4, "little")
        elif isinstance(value, (list, tuple, dict)):
            numbers[id(value)] = len(numbers)
            made += (
                (b"}" if isinstance(value, dict) else b"]")
                + b"r"
                + numbers[id(value)].to_bytes(4, "little")
            )
            each: list[tuple[Any, Any]] = (
                list(value.items())
                if isinstance(value, dict)
                else [(None, inner) for inner in value]
            )
            for key, inner in reversed(each):
                tasks += [("raw", b"a" if key is None else b"s"), ("put", inner)] + (
                    [] if key is None else [("put", key)]
                )
        else:
            made += pickle.dumps(value, protocol=2)[2:-1]
    return bytes(made) + b"."


def make_archive(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as written:
        for name, data in members.items():
            written.writestr(name.replace("__", "."), data)
    return made.getvalue()


def test_bundle_extraction_is_confined_and_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with zipfile.ZipFile(folder / "slip.zip", "w") as written:
        written.writestr(
            "incident.json", '{"kind": "mismatch", "severity": "alert", "summary": "s"}'
        )
        written.writestr("ranks.json", "[]")
        written.writestr("../../slipped", "x")
        written.writestr("/hangwatch-slipped", "x")
    assert main(["analyze", str(folder / "slip.zip"), "--export", str(tmp_path / "out")]) == 4
    assert {path.name for path in tmp_path.rglob("*")} == {"in", "slip.zip"}
    assert not Path("/hangwatch-slipped").exists()

    monkeypatch.setattr("hangwatch.agent.cli.commands.analyze._MAX_FILE_BYTES", 1 << 20)
    (folder / "bomb.zip").write_bytes(
        make_archive(incident__json=b" " * (8 << 20), ranks__json=b"[]")
    )
    capsys.readouterr()
    assert main(["analyze", str(folder / "bomb.zip")]) == 1
    assert "larger than 1 MiB" in capsys.readouterr().err
    with (folder / "shard_0").open("wb") as sparse:
        sparse.truncate(10 << 30)
    assert main(["analyze", str(folder / "shard_0")]) == 1
    assert "larger than 1 MiB" in capsys.readouterr().err


INCIDENT_DOCUMENT = {
    "id": "01J", "job": "j", "attempt": 0, "kind": "mismatch", "severity": "alert", "status": "open",
    "onset_at": "2026-11-21T09:00:00Z", "summary": "s", "advice": "a", "culprits": [1], "waiting": [0], "seq": 7, "fields": ["op"],
    "group": {"name": "0", "desc": "d", "ranks": [0, 1]},
    "calls": [{"ranks": [0], "seq": 7, "op": "all_reduce", "shapes": [[4]], "site": {"file": "t.py", "line": 4, "function": "f"}}],
    "waits": [{"rank": 0, "for": 1, "group": "0", "seq": 7}], "processes": [{"rank": 1, "pid": 5, "signal": 9, "exception": {"type": "E"}}],
    "stacks": [{"ranks": [1], "taken_at": "2026-11-21T09:00:00Z", "frames": [{"function": "f", "file": "t.py", "line": 4}]}],
    "divergence": {"sides": [{"ranks": [0]}, {"ranks": [1]}], "rows": [{"seq": [7, None], "calls": [{"op": "x", "shapes": [[1]]}, None]}]},
}  # fmt: skip
RANK_DOCUMENTS = [
    {
        "rank": r,
        "groups": [
            {
                "name": "0",
                "desc": "d",
                "ranks": [0, 1],
                "entered": 7,
                "completed": 6,
                "op": "all_reduce",
            }
        ],
    }
    for r in range(2)
]
BUNDLE_PATHS = list(iter_document_paths([INCIDENT_DOCUMENT, RANK_DOCUMENTS]))


@FUZZ_SETTINGS
@given(
    odd=st.lists(
        st.tuples(st.sampled_from(BUNDLE_PATHS), st.one_of(JSON_STRATEGY, BOMB_STRATEGY)),
        min_size=1,
        max_size=3,
    )
)
def test_bundles_with_unexpected_parts_are_shown_or_refused(
    odd: list[tuple[DocumentPath, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    altered = replace_parts([INCIDENT_DOCUMENT, RANK_DOCUMENTS], odd)
    incident, ranks = altered if isinstance(altered, list) and len(altered) == 2 else (altered, [])
    try:
        parts = {
            "incident__json": json.dumps(incident).encode(),
            "ranks__json": json.dumps(ranks).encode(),
        }
    except ValueError:  # a part that contains itself cannot be encoded
        reject()
    path = tmp_path / "bundle.zip"
    path.write_bytes(make_archive(**parts))
    assert main(["analyze", str(path), "--export", str(tmp_path / "out")]) in (0, 1, 4)
    capsys.readouterr()
