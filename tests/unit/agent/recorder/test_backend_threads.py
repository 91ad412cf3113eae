"""What the end of a rank waits for: the backend's threads that are still about something, for a
moment.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hangwatch.agent.recorder import installation

StartBusyThread = Callable[[str], threading.Event]


@pytest.fixture
def busy() -> Iterator[StartBusyThread]:
    """Starts a thread of that name which computes without the GIL until the event is set that this
    gives.
    """
    ended: list[tuple[threading.Event, threading.Thread]] = []
    block = bytes(1 << 20)

    def start_thread(name: str) -> threading.Event:
        over, named = threading.Event(), threading.Event()

        def run_computation() -> None:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
            named.set()
            while not over.is_set():
                hashlib.sha256(block)

        thread = threading.Thread(target=run_computation)
        thread.start()
        named.wait()
        ended.append((over, thread))
        return over

    yield start_thread
    for over, thread in ended:
        over.set()
        thread.join()


def test_busy_gloo_thread_is_awaited(busy: StartBusyThread) -> None:
    over = busy("pt_gloo_runloop")
    threading.Timer(0.3, over.set).start()
    installation.wait_until_idle(30)
    assert over.is_set()


def test_busy_gloo_thread_is_awaited_for_a_limited_time(busy: StartBusyThread) -> None:
    over = busy("pt_gloo_runloop")
    installation.wait_until_idle(0.1)
    assert not over.is_set()


def test_other_busy_threads_are_not_awaited(busy: StartBusyThread) -> None:
    busy("somebody's")
    began = time.monotonic()
    installation.wait_until_idle(60)
    assert time.monotonic() - began < 30
