"""Synthetic Flight Recorder dumps, as the process groups of NCCL and gloo write them."""

from __future__ import annotations

from typing import Any

Shapes = list[list[int]]


class SyntheticRecorder:
    """The recorder of one rank. Calls are numbered by group as torch does.

    ``timed``: as with TORCH_NCCL_ENABLE_TIMING, calls have a start time.
    """

    def __init__(
        self,
        rank: int,
        groups: dict[str, list[int]],
        *,
        backend: str = "nccl",
        version: str = "2.10",
        timed: bool = False,
    ) -> None:
        self.rank, self.groups, self.backend, self.version, self.timed = (
            rank,
            groups,
            backend,
            version,
            timed,
        )
        self.entries: list[dict[str, Any]] = []
        self.call_count = 0
        self.has_status = True  # whether its status of process groups is of use
        self.fixed_status: dict[str, dict[str, int]] = {}  # by group, instead of its own
        self._uids = {name: number for number, name in enumerate(groups)}
        self._seq: dict[tuple[str, bool], int] = {}
        self._furthest: dict[tuple[str, str], int] = {}  # by group and state, the last collective

    def record_call(
        self, op: str = "all_reduce", *, inputs: Shapes | None = None, outputs: Shapes | None = None, dtype: str = "Float",
        into: str | None = None, group: str = "0", state: str = "completed", line: int = 10,
    ) -> None:  # fmt: skip
        """``into`` is the dtype of the outputs, if it differs."""
        seq = self._next_seq(group, False)
        inputs = [[64]] if inputs is None else inputs
        self._append_entry(
            op, group, seq, inputs, inputs if outputs is None else outputs, dtype, state, line
        )
        if into is not None:
            self.entries[-1]["output_dtypes"] = [into] * len(self.entries[-1]["output_sizes"])

    def record_coalesced(
        self,
        op: str,
        shapes: Shapes,
        *,
        end: str | None = "coalesced",
        state: str = "completed",
        group: str = "0",
    ) -> None:
        """Only the state of the end entry changes, not those of its parts with the same number."""
        seq = self._next_seq(group, False)
        for shape in shapes:
            self._append_entry(op, group, seq, [shape], [shape], "Float", "scheduled", 10)
        if end is not None:
            self._append_entry(end, group, seq, [[]], [[]], "Float", state, 10)

    def record_p2p(
        self,
        op: str,
        peer: int | None,
        *,
        state: str = "completed",
        shape: list[int] | None = None,
        group: str = "0",
    ) -> None:
        self._append_message(op, peer, self._next_seq(group, True), state, shape, group)

    def record_p2p_batch(
        self,
        *messages: tuple[str, int, list[int]],
        state: str = "completed",
        ended: bool = True,
        group: str = "0",
    ) -> None:
        """Messages of batch_isend_irecv: (operation, peer, shape)."""
        seq = self._next_seq(group, True)
        for op, peer, shape in messages:
            self._append_message(op, peer, seq, "scheduled", shape, group)
        if ended:
            self._append_entry("coalesced", group, seq, [], [], "Float", state, 20, p2p=True)

    def overwrite_oldest(self, records: int) -> None:
        del self.entries[:records]

    def recreate_group(self, group: str) -> None:
        """The group is destroyed, and another one with its name is created."""
        self._uids[group] = max(self._uids.values()) + 1
        self._seq.pop((group, False), None)
        self._furthest.pop((group, "started"), None)
        self._furthest.pop((group, "completed"), None)
        self._seq.pop((group, True), None)

    def make_dump(self) -> dict[str, Any]:
        names = {
            name: {"name": name, "desc": _group_desc(name), "ranks": str(ranks)}
            for name, ranks in self.groups.items()
        }
        if self.backend == "gloo":
            names = {
                "": {
                    "name": "",
                    "desc": "",
                    "ranks": "[]" if len(names) > 1 else str(self.groups["0"]),
                }
            }
        used = {name for name, _ in self._seq}
        status = {str(self._uids[name]): self.make_status(name) for name in sorted(used)}
        return {
            "version": self.version,
            "comm_lib_version": "2.27.5",
            "pg_config": {
                name: config
                for name, config in names.items()
                if name in used or self.backend == "gloo" or name == "0"
            },
            "pg_status": status if self.has_status else {},
            "entries": self.entries,
            "nccl_comm_state": {"0x5c": {"rank": str(self.rank), "commHash": "5c"}},
        }

    def make_status(self, name: str) -> dict[str, int]:
        """A group's status. gloo's, and starts without timing, are always -1."""
        if name in self.fixed_status:
            return self.fixed_status[name]
        started = self._furthest.get((name, "started"), -1)
        completed = self._furthest.get((name, "completed"), -1)
        return {
            "last_enqueued_collective": self._seq.get((name, False), -1),
            "last_started_collective": max(started, completed) if self.timed else -1,
            "last_completed_collective": completed,
        }

    def _next_seq(self, group: str, p2p: bool) -> int:
        self._seq[group, p2p] = self._seq.get((group, p2p), 0) + 1
        return self._seq[group, p2p]

    def _append_message(
        self, op: str, peer: int | None, seq: int, state: str, shape: list[int] | None, group: str
    ) -> None:
        mine = self.groups[group].index(self.rank)
        other = "?" if peer is None else self.groups[group].index(peer)
        shapes = [shape or [64]]
        self._append_entry(
            f"{op} {mine}{'->' if op == 'send' else '<-'}{other}",
            group,
            seq,
            shapes,
            shapes,
            "Float",
            state,
            20,
            p2p=True,
        )

    def _append_entry(
        self,
        op: str,
        group: str,
        seq: int,
        inputs: Shapes,
        outputs: Shapes,
        dtype: str,
        state: str,
        line: int,
        p2p: bool = False,
    ) -> None:
        gloo = self.backend == "gloo"
        if not gloo and not p2p:
            self._furthest[group, state] = seq
        at = 1_700_000_000_000_000_000 + self.call_count
        self.entries.append(
            {
                "record_id": self.call_count,
                "pg_id": self._uids[group],
                "process_group": (group, _group_desc(group)),
                "collective_seq_id": self._seq.get((group, False), 0) if p2p else seq,
                "p2p_seq_id": seq if p2p else self._seq.get((group, True), 0),
                "op_id": self.call_count,
                "profiling_name": f"{self.backend}:{op}",
                "time_created_ns": at,
                "input_sizes": inputs,
                "input_dtypes": [dtype] * len(inputs),
                "output_sizes": outputs,
                "output_dtypes": [dtype] * len(outputs),
                "state": "scheduled" if gloo else state,
                "time_discovered_started_ns": at if self.timed and state != "scheduled" else None,
                "time_discovered_completed_ns": at if state == "completed" and not gloo else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": p2p,
                "thread_name": "python",
                "thread_id": "1",
                "frames": [
                    {
                        "name": "all_reduce",
                        "filename": (
                            "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
                        ),
                        "line": 1,
                    },
                    {"name": "step", "filename": "/home/me/train.py", "line": line},
                ],
            }
        )
        self.call_count += 1


def make_recorders(
    ranks: int,
    *,
    backend: str = "nccl",
    version: str = "2.10",
    timed: bool = False,
    **groups: list[int],
) -> list[SyntheticRecorder]:
    """One for each rank of a job; the default group is "0"."""
    world = {"0": list(range(ranks)), **groups}
    mine = [{n: m for n, m in world.items() if r in m} for r in range(ranks)]
    return [
        SyntheticRecorder(r, mine[r], backend=backend, version=version, timed=timed)
        for r in range(ranks)
    ]


def _group_desc(group: str) -> str:
    return "default_pg" if group == "0" else f"mesh_{group}"
