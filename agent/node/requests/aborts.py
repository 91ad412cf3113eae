"""Ends ranks by order of the server, and reports the result for each.

The signal is SIGKILL, without SIGTERM before it. A rank that hangs is in native code, where a
Python handler for SIGTERM never runs; if a handler did run, it might communicate (to write a last
checkpoint) and hang again, or exit with status 0, which every launcher takes for success. SIGABRT
can be handled as well, and writes a core dump of all the rank's memory. SIGKILL also ends stopped
processes, and always counts as a failure: torchrun sees -9, a shell, Kubernetes and Slurm see 137.
No evidence is lost: it was stored before.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import Command, allows_abort

from ..discovery.watched import WatchedProcess

ABORT_SIGNAL = signal.SIGKILL
_EXIT_TIMEOUT_NS = 5_000_000_000  # then the signal is reported to have had no effect


@dataclass(slots=True)
class AbortTracker:
    """Orders that were carried out, each until the server has acknowledged its result."""

    # By process key: the order's id, and when the signal was sent.
    _signalled: dict[str, tuple[str, int]] = field(default_factory=dict)
    _replies: list[heartbeat.AbortReply] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._signalled or self._replies)

    def abort_process(self, command: Command, process: WatchedProcess | None, now_ns: int) -> None:
        """Ends a watched process, and no other. ``process`` is the one that the command names, if
        it is watched.
        """
        error = _find_refusal_reason(process)
        exit_info = process.exit if process is not None else None
        if process is None or error is not None or exit_info is not None or process.pidfd is None:
            self._add_reply(command, exit_info, error)
            return
        try:
            signal.pidfd_send_signal(process.pidfd, ABORT_SIGNAL)
        except ProcessLookupError:
            pass  # it has just ended: `check_exits` will see it
        except OSError as refusal:
            self._add_reply(
                command, None, f"{ABORT_SIGNAL.name} could not be sent: {refusal.strerror}"
            )
            return
        self._signalled[command.key] = (command.id, now_ns)

    def _add_reply(self, command: Command, exit_info: ExitInfo | None, error: str | None) -> None:
        self._replies.append(
            heartbeat.AbortReply(key=command.key, request=command.id, ended=exit_info, error=error)
        )

    def check_exits(self, watched: Mapping[str, WatchedProcess], now_ns: int) -> bool:
        """Makes a reply for each signalled process that has ended or whose time is up. Returns True
        if there is one.
        """
        has_new_reply = False
        for key, (request, since_ns) in list(self._signalled.items()):
            process = watched.get(key)
            exit_info = process.exit if process is not None else None
            is_alive = process is not None and exit_info is None
            if is_alive and now_ns - since_ns < _EXIT_TIMEOUT_NS:
                continue
            error = None if exit_info is not None else _describe_survivor(process)
            self._replies.append(
                heartbeat.AbortReply(
                    key=key, request=request, signal=ABORT_SIGNAL, ended=exit_info, error=error
                )
            )
            del self._signalled[key]
            has_new_reply = True
        return has_new_reply

    def pending_replies(self) -> tuple[heartbeat.AbortReply, ...]:
        return tuple(self._replies)

    def mark_delivered(self, replies: tuple[heartbeat.AbortReply, ...]) -> None:
        self._replies = [reply for reply in self._replies if reply not in replies]


def _find_refusal_reason(process: WatchedProcess | None) -> str | None:
    if process is None:
        return "this node agent watches no such process"
    if process.exit is not None:
        return None
    identity = process.identity
    if identity is None or not allows_abort(identity.on_hang):
        given = "" if identity is None else identity.on_hang
        state = f"HANGWATCH_ON_HANG={given}" if given else "no HANGWATCH_ON_HANG"
        return (
            f"{state} in its environment does not allow that: start the job with"
            " HANGWATCH_ON_HANG=abort"
        )
    if process.pidfd is None:
        return (
            "this kernel has no pidfd (Linux 5.3 has), so the signal could hit another process that"
            " has the same pid by now"
        )
    return None


def _describe_survivor(process: WatchedProcess | None) -> str:
    state = process.activity.state if process is not None else "?"
    text = (
        f"still there {_EXIT_TIMEOUT_NS // 1_000_000_000} s after {ABORT_SIGNAL.name}, in state"
        f" {state}"
    )
    if state == "D":
        text += ": it ends when its system call returns, from a file system or device that is stuck"
    return text
