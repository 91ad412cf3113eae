"""Whether processes were ended by their launcher after all ranks had finished their work. Ray, for
one, ends its workers itself, and their exit status is not 0.
"""

from __future__ import annotations

import signal

from hangwatch.diagnosis.context import TERMINATION_SIGNALS, DiagnosisContext
from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .failures import get_failure_time

# Launchers end all processes within this time, in seconds.
_TEARDOWN_S = 3.0
_LAUNCHER_SIGNALS = (signal.SIGKILL, *TERMINATION_SIGNALS)


def is_teardown(context: DiagnosisContext, failed: list[Process]) -> bool | None:
    """Whether these processes were ended after they had finished their work. None if the others may
    be about to end.

    A process that destroyed its groups has finished. Where a thread makes the calls, its end does
    not end the process, so nothing but the end of all processes in the same way shows that they
    finished: then all have completed the same calls, and none waits.
    """
    if not all(map(_has_ended_quietly, failed)):
        return False
    if context.graph.find_waiters_of([process.rank for process in failed]):
        return False
    if all(process.lifecycle is Lifecycle.DESTROYED for process in failed):
        return True
    if not all(map(_has_called_in_thread, failed)) or context.graph.get_waiting_ranks():
        return False
    processes = context.attempt.processes.values()
    if len(processes) < 2 or not all(map(_has_completed_all_calls, processes)):
        return False
    if len({process.exit for process in failed}) > 1:
        return False
    if len(failed) == len(processes):
        return True
    is_recent = context.now - get_failure_time(failed[0]) < _TEARDOWN_S
    return None if is_recent else False


def _has_ended_quietly(process: Process) -> bool:
    """Whether its end shows no failure of its own: no exception, no signal but a launcher's."""
    end = process.exit
    if end is None or process.exception is not None:
        return False
    return not end.signal or end.signal in _LAUNCHER_SIGNALS


def _has_called_in_thread(process: Process) -> bool:
    """Whether another thread than the main thread made its newest call."""
    newest = process.newest_stream
    call = newest.calls.get(newest.entered) if newest is not None else None
    return call is not None and call.thread not in (0, process.identity.pid)


def _has_completed_all_calls(process: Process) -> bool:
    return all(_is_complete(stream) for stream in process.streams.values())


def _is_complete(stream: CallStream) -> bool:
    """Whether all its calls are complete, and all members of the group made as many."""
    if stream.completed is not None and stream.completed < stream.entered:
        return False
    if stream.device is not None and stream.device.is_behind_host:
        return False
    group_state = stream.group_state
    if stream.kind is not StreamKind.COLLECTIVE or group_state is None:
        return True
    return not group_state.has_member_behind(stream)
