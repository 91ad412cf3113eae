"""What the end of a rank waits for: the backend's threads that are still about something, for a
moment.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hangwatch.agent.recorder import backend_threads

Busy = Callable[[str], threading.Event]


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Starts a thread of that name which computes without the GIL until the event is set that this
    gives.
    """
    ended: list[tuple[threading.Event, threading.Thread]] = []
    block = bytes(1 << 20)

    def start(name: str) -> threading.Event:
        over, named = threading.Event(), threading.Event()

        def compute() -> None:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
            named.set()
            while not over.is_set():
                hashlib.sha256(block)

        thread = threading.Thread(target=compute)
        thread.start()
        named.wait()
        ended.append((over, thread))
        return over

    yield start
    for over, thread in ended:
        over.set()
        thread.join()


def test_a_busy_thread_of_gloos_is_waited_for(busy: Busy) -> None:
    over = busy("pt_gloo_runloop")
    threading.Timer(0.3, over.set).start()
    backend_threads.let_finish(30)
    assert over.is_set()


def test_but_not_for_long(busy: Busy) -> None:
    over = busy("pt_gloo_runloop")
    backend_threads.let_finish(0.1)
    assert not over.is_set()


def test_nor_for_threads_of_others(busy: Busy) -> None:
    busy("somebody's")
    began = time.monotonic()
    backend_threads.let_finish(60)
    assert time.monotonic() - began < 30
