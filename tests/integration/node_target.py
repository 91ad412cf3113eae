"""A rank as the node agent sees it: a ring, a few calls in it, and then a way to stay or to end.

node_target.py RUN_DIR RANK COMMAND...   commands: sleep | exit N | raise | os_exit N | kill N |
call | calls | native | wait |
block NAME | hold NAME (without and with the GIL, see blocking_calls.py) | block_all
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hangwatch.agent.environment import run_dir
from hangwatch.agent.recorder.stack_dumps import StackDumper
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, encode_signature
from hangwatch.model.ranks import RECORDER_THREAD_NAME, Lifecycle
from hangwatch.ring.layout import EXCEPTION, LiveWord, RecordFlag

sys.path.append(str(Path(__file__).parent))  # the tests run it with PYTHONSAFEPATH
import blocking_calls


class TargetRank:
    def __init__(self, folder: Path, rank: int) -> None:
        pid = os.getpid()
        key = run_dir.format_process_key(pid, run_dir.read_start_ticks(pid))
        self.ring = RingWriter(
            folder / (key + run_dir.RING_SUFFIX), pid=pid, start_ticks=run_dir.read_start_ticks(pid)
        )
        self.dumper = StackDumper(self.ring)
        self.ring.write_identity(
            {
                "job": "node-test", "restart": 0, "rank": rank, "world_size": 2, "local_rank": rank, "python": "3", "torch": "2",
                "program": "node_target.py", "main_thread": threading.main_thread().ident, **self.dumper.registration,
                "on_hang": os.environ.get("HANGWATCH_ON_HANG", ""),
            }
        )  # fmt: skip
        self.ring.set_word(LiveWord.LIFECYCLE, Lifecycle.INITIALISED)
        self.ring.write_pulse(
            0
        )  # no record is in the table of streams yet: readers find them all by themselves
        description = {
            "kind": "collective",
            "name": "0",
            "desc": "default_pg",
            "ranks": "0-1",
            "backend": "gloo",
            "generation": 1,
        }
        slot = self.ring.open_stream(1, description)
        self.stream = StreamRecorder(self.ring, 1, slot, unbox=lambda work: work)

    def make_call(self, *, finish: bool = True) -> None:
        number = self.ring.intern_signature(
            encode_signature(Signature(op="all_reduce", shapes=((4,),), dtype="float32", agree=77))
        )
        site = self.ring.intern_site({"file": "/job/train.py", "line": 41, "function": "step"})
        call = self.stream.enter_call(
            77,
            self.stream.pack_record_body(number, site, RecordFlag.BLOCKING, 16),
            0,
            CompletionMode.RETURN,
        )
        if finish:
            self.stream.finish_call(call)


def keep_pulse(target: TargetRank) -> None:
    """What the recorder's thread does."""
    target.dumper.start_answering()
    while True:
        target.ring.write_pulse(0)
        target.dumper.answer_request()
        time.sleep(0.1)


def where_it_sleeps() -> None:
    time.sleep(120)


def enter_blocking_call(name: str, keeps_gil: bool) -> None:
    """Prints the result once the call has ended."""
    result = blocking_calls.make_call(name, keeps_gil=keeps_gil)()
    reason = os.strerror(ctypes.get_errno())
    os.write(1, f"{name} returned {result} ({reason})\n".encode())


def start_blocked_threads() -> None:
    for name in blocking_calls.CALLS:
        threading.Thread(target=enter_blocking_call, args=(name, False), daemon=True).start()


def main() -> None:
    target = TargetRank(Path(sys.argv[1]), int(sys.argv[2]))
    threading.Thread(
        target=keep_pulse, args=(target,), name=RECORDER_THREAD_NAME, daemon=True
    ).start()
    for _ in range(5):
        target.make_call()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    commands = iter(sys.argv[3:])
    for command in commands:
        if command == "sleep":
            where_it_sleeps()
        elif command == "wait":
            sys.stdin.readline()
        elif command == "call":
            target.make_call(finish=False)
        elif command == "calls":  # for two seconds
            for _ in range(20):
                target.make_call()
                time.sleep(0.1)
        elif command in ("block", "hold"):
            enter_blocking_call(next(commands), command == "hold")
        elif command == "block_all":
            start_blocked_threads()
        elif command == "raise":
            target.ring.write_note(
                EXCEPTION,
                {
                    "type": "ValueError",
                    "message": "planted",
                    "file": "/job/train.py",
                    "line": 9,
                    "function": "f",
                },
            )
            sys.exit(1)
        elif command == "exit":
            target.ring.set_word(LiveWord.LIFECYCLE, Lifecycle.EXITING)
            sys.exit(int(next(commands)))
        elif command == "os_exit":
            os._exit(int(next(commands)))
        elif command == "kill":
            os.kill(os.getpid(), int(next(commands)))
            signal.pause()


main()
