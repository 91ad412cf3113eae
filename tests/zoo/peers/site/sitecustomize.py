"""Loaded by every Python of a peer's job: what PyTorch's tools need that no environment variable
gives them on gloo.
"""

import atexit
import os
import sys
import threading
from pathlib import Path


def dump_when_asked(trigger: Path, prefix: str, over: threading.Event) -> None:
    """Writes this rank's Flight Recorder dump, as ProcessGroupNCCL does at a timeout and nothing
    does for gloo.
    """
    while not trigger.exists():
        if over.wait(0.1):
            return
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        from torch._C._distributed_c10d import _dump_fr_trace

        written = Path(f"{prefix}{dist.get_rank()}")
        partial = written.with_name(f"partial-{written.name}")
        partial.write_bytes(_dump_fr_trace(True, True, False))
        partial.rename(written)


def shorten_timeout(seconds: float) -> None:
    """Process groups made without a timeout of their own get this one, not 30 minutes."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    distributed_c10d.default_pg_timeout = timedelta(seconds=seconds)


if trigger_file := os.environ.get("PEER_DUMP_WHEN"):
    leaving = threading.Event()
    dumper = threading.Thread(
        target=dump_when_asked,
        args=(Path(trigger_file), os.environ["TORCH_FR_DUMP_TEMP_FILE"], leaving),
        daemon=True,
    )
    dumper.start()
    # A daemon thread that outlives the interpreter can abort a process that holds C++ threads.
    atexit.register(lambda: (leaving.set(), dumper.join(1.0)))
if timeout_s := os.environ.get("PEER_TIMEOUT_S"):
    shorten_timeout(float(timeout_s))
