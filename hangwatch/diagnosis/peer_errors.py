"""Recognizes exceptions that a rank raises because a peer is absent, by their messages: they are
consequences, not causes. Pure.
"""

from __future__ import annotations

import re

from hangwatch.model.calls import StreamKind
from hangwatch.tracking.process import Process

# The types that torch raises if a peer is absent; on gloo only RuntimeError. A TimeoutError comes
# from the script and is a cause.
PEER_ERROR_TYPES = re.compile(r"^(RuntimeError|Dist\w*Error)$")
LOST_PEER_MESSAGE = re.compile(
    r"gloo/transport|connection (reset|closed|aborted|refused)|broken pipe|remote (process|peer)",
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


def has_peer_error(process: Process) -> bool:
    """Whether its exception says that a peer was absent or disappeared."""
    exception = process.exception
    if exception is not None and LOST_PEER_MESSAGE.search(exception.message):
        return True
    return has_timed_out(process)
