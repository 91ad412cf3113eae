"""Records the replays of CUDA graphs, which execute collectives without dispatching them.

The collectives that are dispatched during a capture are recorded like any others: all members of a
group capture them, and NCCL may have to connect these for that. Later, each replay of the graph is
one call in the stream of each group that has collectives in it. The members must agree on the number
of these collectives and on their running hash, but not on a number of the graph, since a rank may have
captured more graphs than others.

Nothing here touches the device, and a graph that captured no collective costs a look-up. When a replay
completes is not observable: an event would have to be queried.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from _thread import get_native_id
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangwatch.model.calls import GRAPH_REPLAY, LossReason, extend_chain
from hangwatch.ring import layout
from hangwatch.ring.layout import RecordFlag
from hangwatch.ring.parts import COMPLETED, FLAGS, SIGNATURE, THREAD, UID, RingParts

from . import faults
from .dynamo import run_uncompiled
from .faults import Arguments, KeywordArguments
from .groups import GroupTrack
from .python_kernel import get_recorder
from .recorder import Recorder, call_caches
from .streams import PlannedCalls

_MAX_CAPTURED_CALLS = layout.RECORD_SLOTS - 48  # while other threads make some
_MAX_NAMED_OPS = 3
_AUTOGRAD_THREAD = "pt_autograd"  # the beginning of the names of torch's threads for backward


@dataclass(frozen=True, slots=True)
class CapturedGroup:
    """The collectives of one group in a graph."""

    track: GroupTrack
    detail: str  # what the members must agree on


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph that has collectives. It is not kept alive."""

    ref: weakref.ref[Any]
    groups: tuple[CapturedGroup, ...]


# The captures that began: the recorder, and the number of calls that it had recorded. The keys of all
# three are the ids of graphs.
_captures: dict[int, tuple[Recorder, int]] = {}
_graphs: dict[int, CapturedGraph] = {}
_plans: dict[int, PlannedCalls] = {}  # one for each graph that was replayed
call_caches.append(_plans)


def track_graphs(graph_class: Any) -> None:
    """Records the replays of a class such as `torch.cuda.CUDAGraph`."""
    where = "examining the capture of a CUDA graph"
    faults.extend_method(graph_class, "capture_begin", _begin_capture, where)
    faults.extend_method(graph_class, "capture_end", _end_capture, where)
    faults.extend_method(graph_class, "reset", _forget_graph, where)
    original = getattr(graph_class, "replay", None)
    if original is None or hasattr(original, "__hangwatch__"):
        return

    # Serving replays thousands of graphs a second.
    @functools.wraps(original)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in _graphs:
            return original(self, *args, **kwargs)
        plan = None
        try:
            plan = _plans.get(id(self)) or run_uncompiled(_plan_replay, self)
            if plan is not None:
                plan.enter()
        except Exception as error:  # our error: the replay continues
            faults.run_guarded("recording a lost replay", _record_loss, self, error)
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            if plan is not None:
                faults.run_guarded("recording the failure of a replay", plan.fail)
            raise

    # Dynamo calls the method, instead of tracing into it, as it does with the original.
    replay._torchdynamo_disable = True  # type: ignore[attr-defined]
    replay.__hangwatch__ = True  # type: ignore[attr-defined]
    graph_class.replay = replay


def _begin_capture(graph: Any, _args: Arguments, _kwargs: KeywordArguments) -> None:
    _forget_graph(graph, (), {})
    recorder = get_recorder()
    if recorder is not None:
        with _losing_replays(recorder):
            _captures[id(graph)] = recorder, RingParts(recorder.ring.map).count_records()


def _end_capture(graph: Any, _args: Arguments, _kwargs: KeywordArguments) -> None:
    recorder, first = _captures.pop(id(graph), (None, 0))
    if recorder is not None and recorder is get_recorder():
        with _losing_replays(recorder):
            groups = _read_captured_groups(recorder, first)
            if groups:
                _remember_graph(graph, groups)


@contextlib.contextmanager
def _losing_replays(recorder: Recorder) -> Iterator[None]:
    """Records that the replays of a graph will be lost if examining its capture fails."""
    try:
        yield
    except Exception:
        recorder.groups.mark_incomplete(LossReason.FAULT)
        raise


def _remember_graph(graph: Any, groups: tuple[CapturedGroup, ...]) -> None:
    graph_id = id(graph)

    def handle_deletion(ref: Any, graphs: Any = _graphs, plans: Any = _plans) -> None:
        known = graphs.get(graph_id)
        if known is not None and known.ref is ref:
            del graphs[graph_id]
            plans.pop(graph_id, None)

    _graphs[graph_id] = CapturedGraph(weakref.ref(graph, handle_deletion), groups)


def _forget_graph(graph: Any, _args: Arguments, _kwargs: KeywordArguments) -> None:
    """Forgets what a graph captured, since it was reset or captures something else."""
    for table in (_captures, _graphs, _plans):
        table.pop(id(graph), None)


def _read_captured_groups(recorder: Recorder, first: int) -> tuple[CapturedGroup, ...]:
    """The collectives that were captured since record ``first``, from the ring.

    A capture is that of CUDA streams, and torch executes a backward pass in threads of its own. Calls
    of other threads are not captured, and neither are those whose completion is observable: these
    were executed by the CPU.
    """
    ring = RingParts(recorder.ring.map)
    end = ring.count_records()
    if end - first > _MAX_CAPTURED_CALLS:
        # Another member may have made fewer calls in other groups, so that it records its replays.
        raise OverflowError(
            f"more than {_MAX_CAPTURED_CALLS} calls, so that the replays are not watched"
        )
    tracks = {}
    for track in list(recorder.groups.tracks.values()):
        if track.collective_stream is not None:
            tracks[track.collective_stream.uid] = track
    is_capturing = {get_native_id(): True}  # by thread
    ops: dict[int, list[str]] = {}
    hashes: dict[int, int] = {}
    for record in ring.read_records(first, end):
        uid, thread = record[UID], record[THREAD]
        is_captured = record[COMPLETED] == layout.UNKNOWN_COMPLETED
        if uid not in tracks or not is_captured or record[FLAGS] & RecordFlag.RETRACTED:
            continue
        if thread not in is_capturing:
            is_capturing[thread] = _is_autograd_thread(thread)
        if is_capturing[thread]:
            signature = ring.read_interned(ring.signatures, record[SIGNATURE])
            if signature is None:
                raise LookupError("the signature of a call is lost")
            ops.setdefault(uid, []).append(str(signature["op"]))
            hashes[uid] = extend_chain(hashes.get(uid, 0), int(signature["agree"]))
    return tuple(
        CapturedGroup(tracks[uid], f"{_describe_collectives(names)}, hash {hashes[uid]:016x}")
        for uid, names in ops.items()
    )


def _is_autograd_thread(thread: int) -> bool:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().startswith(_AUTOGRAD_THREAD)
    except OSError:  # it has exited
        return False


def _describe_collectives(ops: Sequence[str]) -> str:
    """``12 collectives (all_reduce, broadcast)``."""
    names = list(dict.fromkeys(ops))
    if len(names) > _MAX_NAMED_OPS:
        names[_MAX_NAMED_OPS:] = ["…"]
    return f"{len(ops)} collective{'s' if len(ops) > 1 else ''} ({', '.join(names)})"


def _plan_replay(graph: Any) -> PlannedCalls | None:
    """Prepares the calls of a graph's replays; None if its groups are gone."""
    recorder = get_recorder()
    if recorder is None:
        return None
    calls = []
    for group in _graphs[id(graph)].groups:
        stream = group.track.collective_stream
        if stream is None or recorder.groups.streams.get(stream.uid) is not stream:
            continue
        if group.track.group_ref() is None:  # the stream may be closed at any time
            stream.mark_incomplete(LossReason.FAULT)
        else:
            calls.append((stream, group.detail))
    if not calls:
        _forget_graph(graph, (), {})
        return None
    plan = _plans[id(graph)] = recorder.plan_calls(GRAPH_REPLAY, calls)
    return plan


def _record_loss(graph: Any, error: Exception) -> None:
    """Records that an error of ours kept a replay from being recorded."""
    faults.record_fault("recording the replay of a CUDA graph", error)
    for group in _graphs[id(graph)].groups:
        group.track.mark_incomplete(messages=False)
