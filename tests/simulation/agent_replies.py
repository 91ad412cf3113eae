"""The replies of a simulated node agent to the server's commands, kept until they are delivered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .parallel_job import JobRun
from .queued_streams import waits_for_device
from .rank_streams import list_streams

MAX_CALLS = 64  # in a reply, as in the node agent
_TORCH_FILE = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"

Document = dict[str, Any]


@dataclass(slots=True)
class CommandReplies:
    pending: dict[str, list[Document]] = field(default_factory=dict)  # by field of the heartbeat
    in_flight: dict[str, list[Document]] = field(default_factory=dict)

    def take_pending(self) -> dict[str, list[Document]]:
        """Those of the heartbeat that is sent now."""
        self.in_flight, self.pending = self.pending, {}
        return self.in_flight

    def restore_in_flight(self) -> None:
        """The heartbeat was not delivered: the next one repeats its replies."""
        for name, replies in self.in_flight.items():
            self.pending[name] = replies + self.pending.get(name, [])
        self.in_flight = {}

    def execute_command(self, command: Document, run: JobRun, now: float) -> None:
        rank = int(command["key"].partition("-")[0])
        reply = {"key": command["key"], "request": command["id"]}
        if command["ask"] == "stacks":
            reply |= {"source": "py-spy", "threads": [make_thread_stack(run, rank, now)]}
            self.pending.setdefault("samples", []).append(reply)
            return
        if command["ask"] == "hardware":
            self.pending.setdefault("hardware", []).append(reply)
            return
        uid, first = command["uid"], max(1, command["from_seq"])
        calls: list[Document] = []
        for stream in list_streams(run, rank, now):
            if stream.uid == uid:
                calls = [stream.encode_call(n, now) for n in range(first, stream.entered + 1)]
        reply |= {"uid": uid, "calls": calls[-MAX_CALLS:]}
        self.pending.setdefault("calls", []).append(reply)


def make_thread_stack(run: JobRun, rank: int, now: float) -> Document:
    """The main thread's stack: in a collective while the rank waits, else in its own code."""
    if any(stream.pending_since for stream in list_streams(run, rank, now)):
        inner = {"function": "all_reduce", "file": _TORCH_FILE, "line": 2810}
    elif run.shape.queues_calls and waits_for_device(run, rank, now):
        inner = {
            "function": "log_loss",
            "file": "/u/train.py",
            "line": 71,
            "text": "total += loss.item()",
        }
    else:
        inner = {
            "function": "load_batch",
            "file": "/u/data.py",
            "line": 44 if run.active_fault(now) else 40,
            "text": "return self._ready.get()",
        }
    frames = [
        inner,
        {"function": "step", "file": "/u/train.py", "line": 53},
        {"function": "main", "file": "/u/train.py", "line": 9},
    ]
    return {"thread": "MainThread", "main": True, "frames": frames}
