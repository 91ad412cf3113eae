"""Which objects the garbage collection of a server with many ranks examines."""

from __future__ import annotations

import gc

from hangwatch.server.core import load
from hangwatch.server.core.load import GarbageScheduler


def test_stable_state_is_frozen_for_gc_once() -> None:
    made, before = GarbageScheduler(), gc.get_freeze_count()
    try:
        made.update(load.MIN_PROCESSES - 1, 0.0)
        made.update(load.MIN_PROCESSES - 1, 1000.0)
        assert gc.get_freeze_count() == before, "the state of a small job is collected fast"
        made.update(2 * load.MIN_PROCESSES, 1001.0)
        assert (frozen := gc.get_freeze_count()) > before
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated] # lists of nothing
        made.update(2 * load.MIN_PROCESSES, 2000.0)
        assert gc.get_freeze_count() <= frozen, "nothing was added"
        made.update(2 * load.MIN_PROCESSES + 1, 2001.0)
        made.update(2 * load.MIN_PROCESSES + 1, 2001.0 + load.STEADY_AFTER_S + 1)
        assert gc.get_freeze_count() >= frozen + len(kept), "one more, and steady since"
    finally:
        gc.unfreeze()


def test_new_objects_are_collected_while_old_ones_are_freed() -> None:
    before = gc.get_threshold()
    gc.set_threshold(*load.THRESHOLDS)
    try:
        old = [[] for _ in range(50_000)]  # type: ignore[var-annotated] # lists of nothing
        gc.collect()
        kept = []
        for n in range(len(old)):
            kept.append([n])
            old.pop()
            if n % 500 == 0:
                load.collect_new_objects()
                assert len(gc.get_objects(0)) < 2_000
        assert len(kept) == 50_000
        with load.paused_collection():
            more = [[n] for n in range(5_000)]
            load.collect_new_objects()
            assert len(gc.get_objects(0)) >= len(more), "some objects are still in use"
    finally:
        gc.set_threshold(*before)
