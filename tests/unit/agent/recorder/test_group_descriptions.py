"""What the recorder knows of a process group that torch.distributed does not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import ProcessGroup, ProcessGroupGloo

from hangwatch.agent.recorder.groups import GroupRegistry
from hangwatch.agent.recorder.streams import StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter


def test_backends_of_a_group_that_was_put_together_by_hand(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "a.ring", pid=1, start_ticks=1)

    def make_stream(uid: int, slot: int) -> StreamRecorder:
        return StreamRecorder(ring, uid, slot, lambda work: work)

    store = HashStore()
    pg = ProcessGroup(store, 0, 1)
    gloo = ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
    pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    track = GroupRegistry(ring, make_stream, lambda: None).open_group(pg)
    assert track.group.backend == "cpu:gloo"
    assert track.group.foreign
    assert (track.group.ranks, track.group.number) == ((0,), 0)
