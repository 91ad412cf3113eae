"""The ranks of a scripted job: what each one does, and the calls that it made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hangwatch.model.calls import Call, Signature, with_agreement_hash
from hangwatch.model.operators import MustMatch
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.protocol import heartbeat as wire

ALL_FIELDS = MustMatch.DTYPE | MustMatch.SHAPE | MustMatch.REDUCE_OP | MustMatch.ROOT


def make_signature(
    op: str, *, shape: tuple[int, ...] = (64,), dtype: str = "float32", reduce_op: str | None = "sum", root: int | None = None,
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Signature:  # fmt: skip
    numel = 1
    for n in shape:
        numel *= n
    signature = Signature(
        op=op,
        shapes=(shape,),
        dtype=dtype,
        reduce_op=reduce_op,
        root=root,
        splits=splits,
        numel=numel,
    )
    return with_agreement_hash(signature, ALL_FIELDS, (1, numel))


@dataclass
class ScriptedStream:
    """One rank's calls in one stream."""

    uid: int
    identity: wire.StreamIdentity
    calls: list[Call] = field(default_factory=list)
    completed: int = 0
    entered_at: list[float] = field(default_factory=list)
    # How far the device has come, where the backend counts that instead of completed calls.
    device: wire.DeviceStatus | None = None
    lost_from_seq: int = 0  # calls from here on have uncertain numbers; 0: none was lost

    def list_calls(self, now: float) -> list[Call]:
        """The calls, with their ages at a time."""
        return [
            replace(call, entered_s=now - entered_at)
            for call, entered_at in zip(self.calls, self.entered_at, strict=True)
        ]


@dataclass
class ScriptedRank:
    number: int
    host: str = "node0"
    agent: str = ""  # empty: that of its host
    alive: bool = True
    lifecycle: Lifecycle = Lifecycle.INITIALISED
    state: str = "S"
    idle: bool = True
    busy_until: float = 0.0
    exit: ExitInfo | None = None
    exited_at: float = 0.0
    exception: ExceptionInfo | None = None
    exception_at: float = 0.0
    phase: str | None = None
    pulse_at: float | None = None
    is_reporting: bool = True  # its agent reports it
    streams: dict[str, ScriptedStream] = field(default_factory=dict)
    dropped: int = 0  # calls that were not recorded in any stream
    opened: int = 0  # streams ever opened, if not only the reported ones
