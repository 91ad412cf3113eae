"""NCCL's profiler plugin, called as NCCL calls it, and what a node agent reads of it."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hangwatch.agent.recorder import nccl, python_kernel
from hangwatch.agent.recorder.native import build, cache
from hangwatch.agent.recorder.nccl import NcclPlugin
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring import communicators, layout
from hangwatch.ring.reader import RingReader, StreamState
from tests.simulation.nccl_plugin import NcclLibrary, SimulatedCommunicator

IDENTITY = 0xABCDEF0123456789


@pytest.fixture(scope="module")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if build.find_compiler(os.environ) is None:
        pytest.skip(build.NO_COMPILER_MESSAGE)
    cache_dir = tmp_path_factory.mktemp("cache")
    return build.build_plugin({**os.environ, "HANGWATCH_CACHE_DIR": str(cache_dir)})


class Watched:
    """A ring with the plugin attached to it."""

    def __init__(self, path: Path, folder: Path, *, follows_device: bool) -> None:
        self.ring = RingWriter(folder / "1-1.ring", pid=1, start_ticks=1, has_communicators=True)
        self.ring.write_identity({"job": "j", "rank": 0})
        self.plugin = NcclPlugin(path, follows_device=follows_device)
        self.plugin.attach_ring(self.ring)
        self.reader = RingReader(self.ring.map)
        self.library = NcclLibrary(path)

    def read_streams(self) -> dict[str, StreamState]:
        snapshot = self.reader.read_snapshot(monotonic_ns())
        return {state.group.foreign: state for state in snapshot.streams}

    def read_devices(self) -> list[tuple[int, int, int | None, int]]:
        snapshot = self.reader.read_snapshot(monotonic_ns())
        return [(entry.uid, *entry.counters) for entry in snapshot.device_entries]


@pytest.fixture
def watched(plugin_path: Path, tmp_path: Path) -> Watched:
    return Watched(plugin_path, tmp_path, follows_device=False)


@pytest.fixture
def watched_device(plugin_path: Path, tmp_path: Path) -> Watched:
    return Watched(plugin_path, tmp_path, follows_device=True)


def test_communicator_of_another_library_is_a_group_of_its_own(watched: Watched) -> None:
    communicator = SimulatedCommunicator(watched.library, IDENTITY, rank=1, size=4, name="tp")
    assert watched.read_streams() == {}, "it was not used"
    for number in range(1, 4):
        communicator.call("AllReduce", count=number)

    (state,) = watched.read_streams().values()

    assert state.uid > communicators.FIRST_UID
    assert state.group.foreign == f"nccl:{IDENTITY:016x}"
    assert (state.group.number, tuple(state.group.ranks)) == (1, (0, 1, 2, 3))
    assert (state.entered, state.completed, state.group.desc) == (3, None, "tp")
    calls = watched.reader.read_calls(state.uid, monotonic_ns())
    assert [call.seq for call in calls] == [1, 2, 3]
    newest = calls[-1].signature
    assert (newest.op, newest.dtype, newest.shapes) == ("ncclAllReduce", "float32", ((3,),))
    assert calls[-1].chain == state.chain


def test_running_hash_is_the_same_on_all_members_and_differs_with_a_call(
    plugin_path: Path, tmp_path: Path
) -> None:
    chains = []
    for rank, counts in enumerate(((5, 6, 7), (5, 6, 7), (5, 8, 7))):
        folder = tmp_path / str(rank)
        folder.mkdir()
        watched = Watched(plugin_path, folder, follows_device=False)
        communicator = SimulatedCommunicator(watched.library, IDENTITY, rank=rank, size=3)
        for count in counts:
            communicator.call(count=count)
        delta = watched.reader.read_delta(0)
        ((uid, by_seq),) = delta.chains.items()
        assert delta.newest_ops == {uid: "ncclAllReduce"}
        chains.append(by_seq)

    assert chains[0] == chains[1]
    assert chains[0][1] == chains[2][1]
    assert chains[0][2] != chains[2][2]
    assert chains[0][3] != chains[2][3], "a difference remains in the hash"


def test_calls_of_torch_are_not_a_group_of_their_own(watched: Watched) -> None:
    communicator = SimulatedCommunicator(watched.library, IDENTITY, rank=0, size=2)
    watched.plugin.mark_call(7, 1)
    communicator.call()
    watched.plugin.mark_call(0, 0)

    assert watched.read_streams() == {}
    assert watched.read_devices() == [], "the device is not followed"

    other = SimulatedCommunicator(watched.library, IDENTITY + 1, rank=0, size=2)
    other.call()
    assert list(watched.read_streams()) == [f"nccl:{IDENTITY + 1:016x}"]


def test_device_progress_of_torchs_group_has_the_number_of_its_stream(
    watched_device: Watched,
) -> None:
    communicator = SimulatedCommunicator(watched_device.library, IDENTITY, rank=0, size=2)
    operations = []
    for seq in (1, 2, 3):
        watched_device.plugin.mark_call(7, seq)
        # torch may make several calls of NCCL for one of its own.
        operations.append([communicator.call() for _ in range(2)])
        watched_device.plugin.mark_call(0, 0)
    assert watched_device.read_devices() == [(7, 3, 0, 0)]

    for operation in operations[0]:
        communicator.begin(operation)
        communicator.end(operation)
    first, second = operations[1]
    communicator.begin(first)
    communicator.end(first)
    assert watched_device.read_devices() == [(7, 3, 2, 1)], "a part of call 2 is not complete"

    communicator.begin(second)
    communicator.end(second)
    assert watched_device.read_devices() == [(7, 3, 2, 2)]


def test_device_progress_of_another_librarys_communicator(watched_device: Watched) -> None:
    communicator = SimulatedCommunicator(watched_device.library, IDENTITY, rank=0, size=2)
    done = communicator.call()
    communicator.begin(done)
    communicator.end(done)
    begun = communicator.call()
    communicator.begin(begun)
    communicator.call(is_enqueued=False)

    (state,) = watched_device.read_streams().values()

    assert state.entered == 3
    assert watched_device.read_devices() == [(state.uid, 2, 2, 1)]
    snapshot = watched_device.reader.read_snapshot(monotonic_ns())
    assert snapshot.device_status is layout.DeviceStatusState.REPORTED


def test_operations_beyond_those_kept_make_the_device_unknown(watched_device: Watched) -> None:
    communicator = SimulatedCommunicator(watched_device.library, IDENTITY, rank=0, size=2)
    for _ in range(2000):
        communicator.call()
    assert watched_device.read_devices() == []
    assert len(watched_device.read_streams()) == 1


def test_version_4_counts_what_is_passed_to_the_device(watched: Watched, plugin_path: Path) -> None:
    library = NcclLibrary(plugin_path, version=4)
    communicator = SimulatedCommunicator(library, IDENTITY, rank=0, size=2)
    communicator.call()
    communicator.call(is_enqueued=False)
    (state,) = watched.read_streams().values()
    assert state.entered == 1


def test_slot_of_a_destroyed_communicator_is_used_again(watched: Watched) -> None:
    for number in range(1000):
        communicator = SimulatedCommunicator(watched.library, number + 1, rank=0, size=2)
        communicator.call()
        if number < 999:
            communicator.destroy()
    in_use = f"nccl:{1000:016x}"
    assert in_use in watched.read_streams()
    later_ns = monotonic_ns() + int(1e9 * communicators.CLOSED_SHOWN_S) + 1
    streams = watched.reader.read_snapshot(later_ns).streams
    assert [state.group.foreign for state in streams] == [in_use]
    assert watched.reader.read_snapshot(monotonic_ns()).faults == ()


def test_communicators_beyond_the_table_are_said_to_be_unwatched(watched: Watched) -> None:
    made = [
        SimulatedCommunicator(watched.library, number + 1, rank=0, size=2)
        for number in range(layout.COMMUNICATOR_SLOTS + 3)
    ]
    for communicator in made:
        communicator.call()
    assert len(watched.read_streams()) == layout.COMMUNICATOR_SLOTS
    (fault,) = watched.reader.read_snapshot(monotonic_ns()).faults
    assert fault == "3 NCCL communicators beyond 128 are not watched"
    made[-1].destroy()


def test_events_after_the_end_of_a_communicator_are_harmless(watched_device: Watched) -> None:
    communicator = SimulatedCommunicator(watched_device.library, IDENTITY, rank=0, size=2)
    operation = communicator.call()
    communicator.begin(operation)
    communicator.destroy()
    communicator.end(operation)
    communicator.call()
    (state,) = watched_device.read_streams().values()
    assert state.entered == 2 and watched_device.read_devices() == []


def test_last_call_is_read_after_the_communicator_is_gone(watched: Watched) -> None:
    """A rank may end right after it, which is no reason to take the call for one that it did not make."""
    communicator = SimulatedCommunicator(watched.library, IDENTITY, rank=0, size=2)
    communicator.call()
    communicator.destroy()
    (state,) = watched.read_streams().values()
    assert state.entered == 1
    later_ns = monotonic_ns() + int(1e9 * communicators.CLOSED_SHOWN_S) + 1
    assert watched.reader.read_snapshot(later_ns).streams == ()


def test_forked_child_does_not_write_the_parents_ring(watched: Watched) -> None:
    communicator = SimulatedCommunicator(watched.library, IDENTITY, rank=0, size=2)
    communicator.call()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            communicator.call()
            SimulatedCommunicator(watched.library, IDENTITY, rank=0, size=2)
        except RuntimeError:  # NCCL goes on without a profiler
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    (state,) = watched.read_streams().values()
    assert state.entered == 1


def test_plugin_needs_no_library_but_libc(plugin_path: Path) -> None:
    assert plugin_path.stat().st_size < 64 << 10
    content = plugin_path.read_bytes()
    assert b"libstdc++" not in content
    assert b"libtorch" not in content


class TestLoading:
    @pytest.fixture(autouse=True)
    def nccl_is_new_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nccl, "_explain_unsupported", lambda: "")

    @pytest.fixture
    def env(self, plugin_path: Path) -> dict[str, str]:
        return {"HANGWATCH_CACHE_DIR": str(plugin_path.parent), "HANGWATCH_NCCL": "calls"}

    def test_plugin_is_named_to_nccl(self, env: dict[str, str], plugin_path: Path) -> None:
        plugin, reason = nccl.load_plugin(env)
        assert plugin is not None and not reason
        assert env[cache.PLUGIN_VARIABLE] == str(plugin_path)
        assert nccl.load_plugin(env)[0] is not None, "a child finds it in its environment"

    @pytest.mark.parametrize("level", ["off", "", "nonsense"])
    def test_nothing_is_loaded_unless_it_is_asked_for(
        self, env: dict[str, str], level: str
    ) -> None:
        env["HANGWATCH_NCCL"] = level
        assert nccl.load_plugin(env) == (None, "")
        assert cache.PLUGIN_VARIABLE not in env

    def test_profiler_of_the_job_is_left_alone(
        self, env: dict[str, str], capfd: pytest.CaptureFixture[str]
    ) -> None:
        env[cache.PLUGIN_VARIABLE] = "/opt/inspector.so"
        plugin, reason = nccl.load_plugin(env)
        assert plugin is None and "another plugin" in reason
        assert env[cache.PLUGIN_VARIABLE] == "/opt/inspector.so"

    def test_plugin_that_is_not_built_is_reported_for_the_builder(
        self, env: dict[str, str], tmp_path: Path
    ) -> None:
        env["HANGWATCH_CACHE_DIR"] = str(tmp_path)
        assert nccl.load_plugin(env) == (None, cache.NOT_BUILT_REASON)
        assert cache.PLUGIN_VARIABLE not in env


def test_plugin_is_built_once(plugin_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it was built again")

    monkeypatch.setattr(build, "compile_plugin", fail)
    env = {**os.environ, "HANGWATCH_CACHE_DIR": str(plugin_path.parent)}
    assert build.build_plugin(env) == plugin_path


def test_failed_build_says_why(tmp_path: Path) -> None:
    env = {"HANGWATCH_CACHE_DIR": str(tmp_path), "CXX": "false", "PATH": os.environ["PATH"]}
    with pytest.raises(build.BuildError):
        build.build_plugin(env)
    assert cache.read_plugin_failure(env).startswith("false ended with status 1")


def test_kernel_in_python_marks_its_call() -> None:
    """For the native one, the programs for NCCL show it (tests/zoo/nccl)."""
    marks: list[tuple[int, int]] = []
    during: list[tuple[int, int]] = []

    def redispatch(*args: int) -> int:
        during.append(marks[-1])
        return 1 // args[0]

    entered: Any = (SimpleNamespace(uid=7), 12)
    mark_call = cast("nccl.MarkCall", lambda *mark: marks.append(mark))
    assert python_kernel._redispatch_marked(mark_call, entered, redispatch, (1,)) == 1
    with pytest.raises(ZeroDivisionError):
        python_kernel._redispatch_marked(mark_call, entered, redispatch, (0,))
    assert during == [(7, 12), (7, 12)]
    assert marks == [(7, 12), (0, 0), (7, 12), (0, 0)]
