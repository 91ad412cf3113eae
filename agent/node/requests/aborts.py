"""Ends ranks that the server orders to be ended, and tells what became of each.

The signal is SIGKILL, at once. A rank that hangs sits in native code, where a handler of Python's
for SIGTERM never runs; where one runs, it may communicate (a last checkpoint) and hang anew, or
exit with status 0, which every launcher takes for success and none restarts. SIGABRT can be handled
as well, and leaves a core of all the memory that the rank has. SIGKILL ends also what is stopped,
and always counts as a failure: torchrun sees -9, a shell, Kubernetes and Slurm see 137. Nothing
that a handler could have told is lost, as the evidence was stored before.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat

from ..discovery.watched import WatchedProcess

ABORT_SIGNAL = signal.SIGKILL
# until what was sent a signal and is still there counts as not ended
_EXIT_TIMEOUT_NS = 5_000_000_000


@dataclass(slots=True)
class AbortTracker:
    """Orders that were carried out, each until the server has acknowledged what became of it."""

    _signalled: dict[str, tuple[str, int]] = field(
        default_factory=dict
    )  # by process: the order's id, and when
    _replies: list[heartbeat.AbortReply] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._signalled or self._replies)

    def abort_process(
        self, command: heartbeat.Command, w: WatchedProcess | None, now_ns: int
    ) -> None:
        """Ends a process that is under watch here, and no other. ``w`` is the one that the command
        names, if there is one.
        """
        error = _find_refusal_reason(w)
        if w is None or error is not None or w.exit is not None or w.pidfd is None:
            ended = w.exit if w is not None else None
            self._replies.append(
                heartbeat.AbortReply(key=command.key, request=command.id, ended=ended, error=error)
            )
            return
        try:
            signal.pidfd_send_signal(w.pidfd, ABORT_SIGNAL)
        except ProcessLookupError:
            pass  # it ends just now: `look` will see it
        except OSError as refused:
            why = f"{ABORT_SIGNAL.name} could not be sent: {refused.strerror}"
            self._replies.append(
                heartbeat.AbortReply(key=command.key, request=command.id, error=why)
            )
            return
        self._signalled[command.key] = (command.id, now_ns)

    def check_exits(self, watched: Mapping[str, WatchedProcess], now_ns: int) -> bool:
        """Whether there is news of some process that was sent a signal."""
        news = False
        for key, (request, since_ns) in list(self._signalled.items()):
            w = watched.get(key)
            if w is not None and w.exit is None and now_ns - since_ns < _EXIT_TIMEOUT_NS:
                continue
            ended = w.exit if w is not None else None
            error = None if ended is not None else _describe_survivor(w)
            self._replies.append(
                heartbeat.AbortReply(
                    key=key, request=request, signal=ABORT_SIGNAL, ended=ended, error=error
                )
            )
            del self._signalled[key]
            news = True
        return news

    def pending_replies(self) -> tuple[heartbeat.AbortReply, ...]:
        return tuple(self._replies)

    def mark_delivered(self, replies: tuple[heartbeat.AbortReply, ...]) -> None:
        self._replies = [one for one in self._replies if one not in replies]


def _find_refusal_reason(w: WatchedProcess | None) -> str | None:
    if w is None:
        return "this node agent watches no such process"
    if w.exit is None and w.identity is not None and heartbeat.refuses_abort(w.identity.on_hang):
        return f"its environment refuses that: HANGWATCH_ON_HANG={w.identity.on_hang}"
    if w.exit is None and w.pidfd is None:
        return (
            "this kernel has no pidfd (Linux 5.3 has), so that another process could be hit that"
            " was given the same pid"
        )
    return None


def _describe_survivor(w: WatchedProcess | None) -> str:
    state = w.activity.state if w is not None else "?"
    why = (
        ": it ends when its system call returns, to a file system or a device that does not answer"
        if state == "D"
        else ""
    )
    return (
        f"still there {_EXIT_TIMEOUT_NS // 1_000_000_000} s after {ABORT_SIGNAL.name}, in state"
        f" {state}{why}"
    )
