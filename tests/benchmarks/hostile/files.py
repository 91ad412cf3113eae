"""Hostile files for ``hangwatch analyze``: small, and they take long or much memory if nothing stops it."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.harness.processes import clean_environment, read_resident_mb

from .attacks import HostileError

ANALYZE_TIMEOUT_S = 60.0
MAX_ANALYZE_MB = 2500.0


def make_file_attack(folder: Path) -> Callable[[random.Random], None]:
    """Pickles and bundles that are small, and take long or much memory if nothing stops them."""

    def attack(rng: random.Random) -> None:
        path = folder / "dump_rank_0"
        bundle = folder / "bundle.zip"
        is_bundle = rng.random() < 0.4
        if is_bundle:
            bundle.write_bytes(make_bundle(rng))
        else:
            path.write_bytes(make_pickle(rng))
        run_analyze(bundle if is_bundle else path)

    return attack


def run_analyze(path: Path) -> None:
    """Raises HostileError if the command takes too long, too much memory, or ends in a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hangwatch.agent.cli", "analyze", str(path)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    ends_at, most_mb = time.monotonic() + ANALYZE_TIMEOUT_S, 0.0
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            most_mb = max(most_mb, read_resident_mb(process.pid))
        if time.monotonic() > ends_at or most_mb > MAX_ANALYZE_MB:
            process.kill()
            kept = path.with_suffix(".kept")
            path.rename(kept)
            raise HostileError(f"analyze took {most_mb:.0f} MB, or too long: {kept}")
        time.sleep(0.05)
    assert process.stderr is not None
    message = process.stderr.read().decode(errors="replace")
    if "Traceback" in message:
        raise HostileError(f"analyze ended in a traceback:\n{message[-2000:]}")


def make_pickle(rng: random.Random) -> bytes:
    """Shared nested containers, as values and as keys of dictionaries; or random opcodes."""
    kind = rng.randrange(4)
    depth = rng.randrange(2, 120)
    if kind == 0:
        body = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(depth))
        return b"\x80\x02}(" + body + b"K\x01u."
    if kind == 1:
        body = b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(depth))
        return b"\x80\x02" + body + b"."
    if kind == 2:
        return b"\x80\x02" + b"]" * (1 << rng.randrange(10, 24)) + b"."
    opcodes = b"]}()aesutl0123N\x85\x86\x87\x88\x89\x94K\x05h\x01q\x02."
    return b"\x80\x04" + bytes(rng.choice(opcodes) for _ in range(rng.randrange(4000))) + b"."


def make_bundle(rng: random.Random) -> bytes:
    """A zip whose documents are far larger than the file."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for name in ("incident.json", "ranks.json"):
            piece = rng.choice([b"[],", b"{},", b"0,", b'"",', b"["])
            content = b"[" + piece * (rng.choice([10, 100_000, 60_000_000]) // len(piece)) + b"0]"
            written.writestr(name, content)
    return archive.getvalue()
