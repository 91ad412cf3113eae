"""Pretended Flight Recorders: dumps as NCCL's and gloo's process groups write them."""

from __future__ import annotations

from typing import Any

Shapes = list[list[int]]


class Recorder:
    """One rank's. Calls are numbered by group as torch does; ``skip`` are calls that have been overwritten."""

    def __init__(self, rank: int, groups: dict[str, list[int]], *, backend: str = "nccl", version: str = "2.10") -> None:
        self.rank, self.groups, self.backend, self.version = rank, groups, backend, version
        self.entries: list[dict[str, Any]] = []
        self.made = 0
        self.counts = True  # whether its status of process groups is of use
        self._seq: dict[tuple[str, bool], int] = {}

    def call(
        self, op: str = "all_reduce", *, inputs: Shapes | None = None, outputs: Shapes | None = None, dtype: str = "Float",
        group: str = "0", state: str = "completed", line: int = 10,
    ) -> None:  # fmt: skip
        seq = self._next(group, False)
        inputs = [[64]] if inputs is None else inputs
        self._entry(op, group, seq, inputs, inputs if outputs is None else outputs, dtype, state, line)

    def coalesced(self, op: str, shapes: Shapes, *, end: str = "coalesced", state: str = "completed", group: str = "0") -> None:
        """Its parts never change their state; the end that they share a number with does."""
        seq = self._next(group, False)
        for shape in shapes:
            self._entry(op, group, seq, [shape], [shape], "Float", "scheduled", 10)
        self._entry(end, group, seq, [[]], [[]], "Float", state, 10)

    def p2p(self, op: str, peer: int, *, state: str = "completed", shape: list[int] | None = None, group: str = "0") -> None:
        arrow = "->" if op == "send" else "<-"
        mine, other = self.groups[group].index(self.rank), self.groups[group].index(peer)
        shapes = [shape or [64]]
        self._entry(f"{op} {mine}{arrow}{other}", group, self._next(group, True), shapes, shapes, "Float", state, 20, p2p=True)

    def overwrite(self, records: int) -> None:
        del self.entries[:records]

    def dump(self) -> dict[str, Any]:
        names = {name: {"name": name, "desc": _desc(name), "ranks": str(ranks)} for name, ranks in self.groups.items()}
        if self.backend == "gloo":
            names = {"": {"name": "", "desc": "", "ranks": "[]" if len(names) > 1 else str(self.groups["0"])}}
        status = {"0": {"last_enqueued_collective": self._seq.get(("0", False), -1), "last_completed_collective": -1}}
        return {"version": self.version, "pg_config": names, "pg_status": status if self.counts else {}, "entries": self.entries}

    def _next(self, group: str, p2p: bool) -> int:
        self._seq[group, p2p] = self._seq.get((group, p2p), 0) + 1
        return self._seq[group, p2p]

    def _entry(
        self, op: str, group: str, seq: int, inputs: Shapes, outputs: Shapes, dtype: str, state: str, line: int, p2p: bool = False
    ) -> None:
        gloo = self.backend == "gloo"
        self.entries.append(
            {
                "record_id": self.made,
                "pg_id": list(self.groups).index(group),
                "process_group": (group, _desc(group)),
                "collective_seq_id": self._seq.get((group, False), 0) if p2p else seq,
                "p2p_seq_id": seq if p2p else 0,
                "op_id": self.made,
                "profiling_name": f"{self.backend}:{op}",
                "time_created_ns": 1_700_000_000_000_000_000 + self.made,
                "input_sizes": inputs,
                "input_dtypes": [dtype] * len(inputs),
                "output_sizes": outputs,
                "output_dtypes": [dtype] * len(outputs),
                "state": "scheduled" if gloo else state,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "frames": [
                    {
                        "name": "all_reduce",
                        "filename": "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
                        "line": 1,
                    },
                    {"name": "step", "filename": "/home/me/train.py", "line": line},
                ],
            }
        )
        self.made += 1


def recorders(ranks: int, *, backend: str = "nccl", version: str = "2.10", **groups: list[int]) -> list[Recorder]:
    """One for each rank of a job; the default group is "0"."""
    world = {"0": list(range(ranks)), **groups}
    return [Recorder(r, {n: m for n, m in world.items() if r in m}, backend=backend, version=version) for r in range(ranks)]


def _desc(group: str) -> str:
    return "default_pg" if group == "0" else f"mesh_{group}"
