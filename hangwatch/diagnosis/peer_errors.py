"""Recognizes failures of a rank for which an absent peer is the reason, by the messages of its
exceptions and by how it was ended: they are consequences, not causes. Pure.
"""

from __future__ import annotations

import re
import signal

from hangwatch.model.calls import StreamKind
from hangwatch.tracking.process import Process

# The types that torch raises if a peer is absent; on gloo only RuntimeError. A TimeoutError comes
# from the script and is a cause.
PEER_ERROR_TYPES = re.compile(r"^(RuntimeError|Dist\w*Error)$")
LOST_PEER_MESSAGE = re.compile(
    r"gloo/transport|connection (reset|closed|aborted|refused)|broken pipe|remote (process|peer)"
    r"|communicator was aborted",
    re.IGNORECASE,
)
# Messages of gloo, of its monitored barrier, and of NCCL's watchdog.
_TIMEOUT_MESSAGE = re.compile(
    r"timed out waiting \d+ms for (recv|send)|monitoredBarrier (in|after) \d+|collective operation"
    r" timeout",
    re.I,
)
# Messages of a store. They belong to a call only while groups are set up: otherwise the script
# itself may wait for a key.
_SETUP_TIMEOUT_MESSAGE = re.compile(
    r"(wait|barrier) timeout after|timed out after .* waiting for clients|timeout waiting for key",
    re.I,
)


def has_timed_out(process: Process) -> bool:
    """Whether it raised an exception because its last call took too long."""
    exception, last = process.exception, process.newest_stream
    if exception is None or last is None or not PEER_ERROR_TYPES.search(exception.type):
        return False
    if _TIMEOUT_MESSAGE.search(exception.message):
        return True
    is_setup = last.kind is StreamKind.SETUP
    return is_setup and _SETUP_TIMEOUT_MESSAGE.search(exception.message) is not None


def was_ended_by_watchdog(process: Process) -> bool:
    """Whether it was aborted while its device had collectives to complete, as torch's watchdog does
    after a timeout or an error of the network. A rank whose device had completed all aborted by
    itself.
    """
    end = process.exit
    if end is None or end.signal != signal.SIGABRT or process.exception is not None:
        return False
    devices = [stream.device for stream in process.streams.values()]
    return any(device is not None and device.is_behind_host for device in devices)


def has_peer_error(process: Process) -> bool:
    """Whether it ended because a peer was absent or disappeared, by its exception or because its
    watchdog ended it.
    """
    if was_ended_by_watchdog(process):
        return True
    exception = process.exception
    if exception is not None and LOST_PEER_MESSAGE.search(exception.message):
        return True
    return has_timed_out(process)
