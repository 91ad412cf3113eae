"""The updates of scripted ranks in heartbeats, as a node agent composes them."""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import LossReason
from hangwatch.protocol import heartbeat as wire

from .scripted_ranks import ScriptedRank, ScriptedStream


def make_process_update(
    rank: ScriptedRank,
    now: float,
    *,
    job: str,
    world_size: int,
    reports_completion: bool = True,
    master: str = "",
) -> wire.ProcessUpdate:
    """``reports_completion`` is False on a backend that does not report it, such as NCCL."""
    return wire.ProcessUpdate(
        key=f"{rank.number}-1",
        identity=wire.ProcessIdentity(
            job=job,
            rank=rank.number,
            world_size=world_size,
            pid=rank.number + 1,
            start_ticks=1,
            started_s=now - 99.0,
            master=master,
        ),
        lifecycle=int(rank.lifecycle),
        state=rank.state,
        idle_s=0.0 if not rank.idle else 100.0,
        phase=rank.phase,
        pulse_s=None if rank.pulse_at is None else now - rank.pulse_at,
        ended=rank.exit,
        ended_s=now - rank.exited_at if rank.exit else 0.0,
        raised=rank.exception,
        raised_s=now - rank.exception_at if rank.exception else 0.0,
        sequences=tuple(
            _make_stream_update(
                stream,
                now,
                has_exited=rank.exit is not None,
                is_completion_known=reports_completion and stream.device is None,
            )
            for stream in rank.streams.values()
        ),
        device=tuple(
            replace(stream.device, enqueued=len(stream.calls))
            for stream in rank.streams.values()
            if stream.device is not None
        ),
        dropped=rank.dropped,
        opened=max(rank.opened, len(rank.streams)),
        losses=tuple(
            (stream.uid, stream.lost_from_seq, int(LossReason.FAULT))
            for stream in rank.streams.values()
            if stream.lost_from_seq
        ),
    )


def _make_stream_update(
    stream: ScriptedStream, now: float, *, has_exited: bool, is_completion_known: bool
) -> wire.StreamUpdate:
    calls = stream.list_calls(now)
    hashed = calls[-wire.MAX_CHECKPOINTS :]
    pending = calls[stream.completed :]
    if not is_completion_known:
        # Hosts run ahead: agents report the newest call, and hashes of some of the others.
        hashed = [call for call in hashed if call.seq % 2 == 0]
        pending = pending[-1:]
    return wire.StreamUpdate(
        uid=stream.uid,
        identity=stream.identity,
        entered=len(calls),
        completed=stream.completed if is_completion_known else None,
        chain=calls[-1].chain,
        op=calls[-1].signature.op,
        entered_s=calls[-1].entered_s,
        pending_s=pending[0].entered_s if pending and is_completion_known else None,
        checkpoints=tuple((c.seq, c.chain) for c in hashed),
        calls=tuple(calls) if has_exited else tuple(c for c in pending if c.entered_s > 0.5),
    )
