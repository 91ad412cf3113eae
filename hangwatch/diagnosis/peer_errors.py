"""What ranks raise for want of a peer: a consequence, by its own words. Pure."""

from __future__ import annotations

import re

from hangwatch.model.calls import StreamKind
from hangwatch.tracking.process import Process

# What torch raises for want of a peer: its own errors, or on gloo just this. A TimeoutError is the
# script's, and a cause.
PEER_ERROR_TYPES = re.compile(r"^(RuntimeError|Dist\w*Error)$")
LOST_PEER_MESSAGE = re.compile(
    r"gloo/transport|connection (reset|closed|aborted|refused)|broken pipe|remote (process|peer)",
    re.IGNORECASE,
)
# The words of gloo, of its monitored barrier, and of NCCL's watchdog.
_TIMEOUT_MESSAGE = re.compile(
    r"timed out waiting \d+ms for (recv|send)|monitoredBarrier (in|after) \d+|collective operation"
    r" timeout",
    re.I,
)
# A store's are a call's only where groups are set up: else it may be the script itself that waits
# for a key.
_SETUP_TIMEOUT_MESSAGE = re.compile(
    r"(wait|barrier) timeout after|timed out after .* waiting for clients|timeout waiting for key",
    re.I,
)


def has_timed_out(process: Process) -> bool:
    """It raised since its last call took too long."""
    raised, last = process.exception, process.newest_stream
    if raised is None or last is None or not PEER_ERROR_TYPES.search(raised.type):
        return False
    setup = (
        last.kind is StreamKind.SETUP and _SETUP_TIMEOUT_MESSAGE.search(raised.message) is not None
    )
    return setup or _TIMEOUT_MESSAGE.search(raised.message) is not None


def has_peer_error(process: Process) -> bool:
    """What it raised says that a peer did not come, or went."""
    lost = (
        process.exception is not None
        and LOST_PEER_MESSAGE.search(process.exception.message) is not None
    )
    return lost or has_timed_out(process)
