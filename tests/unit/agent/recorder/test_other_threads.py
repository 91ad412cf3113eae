"""Reading other threads' frames while garbage is collected and threads start and end."""

import gc
import subprocess
import sys
import threading

from hangwatch.agent.recorder import other_threads
from tests.harness.processes import clean_environment

# In Python 3.11 `sys._current_frames` in place of `get_current_frames` deadlocks here immediately,
# with the GIL held.
_SAMPLING_SCRIPT = """
import threading, time
from hangwatch.agent.recorder.other_threads import get_current_frames

class LetsGoOfTheGil:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0)

def look():
    for _ in range(3000):
        LetsGoOfTheGil()
        get_current_frames()

def start():
    for _ in range(1500):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

threads = [threading.Thread(target=work) for work in (look, look, start, start)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_sampling_never_stops_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SAMPLING_SCRIPT],
        env=clean_environment(),
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_thread_is_sampled_and_gc_state_is_kept() -> None:
    here = threading.get_ident()
    assert other_threads.get_current_frames()[here].f_code.co_name == "get_current_frames"
    assert gc.isenabled()
    gc.disable()
    try:
        assert here in other_threads.get_current_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()
