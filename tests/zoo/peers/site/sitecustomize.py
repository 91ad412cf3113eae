"""Loaded by every Python of a peer's job: what PyTorch's tools need that no environment variable gives them on gloo."""

import os
import sys
import threading
import time
from pathlib import Path


def dump_when_asked(trigger: Path, prefix: str) -> None:
    """Writes this rank's Flight Recorder dump, as ProcessGroupNCCL does at a timeout and nothing does for gloo."""
    while not trigger.exists():
        time.sleep(0.1)
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


if told := os.environ.get("PEER_DUMP_WHEN"):
    threading.Thread(target=dump_when_asked, args=(Path(told), os.environ["TORCH_FR_DUMP_TEMP_FILE"]), daemon=True).start()
if told := os.environ.get("PEER_TIMEOUT_S"):
    shorten_timeout(float(told))
