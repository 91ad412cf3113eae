"""A PostgreSQL of its own for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa


def find_postgres_bin() -> Path | None:
    """Debian keeps the server's programs out of PATH."""
    initdb = shutil.which("initdb")
    return (
        Path(initdb).parent
        if initdb
        else max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
    )


@contextlib.contextmanager
def running_postgres(programs: Path) -> Iterator[str]:
    """Yields the URL of a new server with a socket in its folder. It refuses to run as root."""
    folder = Path(
        tempfile.mkdtemp(prefix="hangwatch-pg-")
    )  # pytest's own folders are closed to others, and too long for a socket
    as_user: list[str] = []
    if os.getuid() == 0:
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        shutil.chown(folder, "nobody", "nogroup")
    data, log = str(folder / "data"), str(folder / "log")

    def run_as_postgres(*command: str) -> None:
        done = subprocess.run(
            [*as_user, *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run_as_postgres(
        str(programs / "initdb"),
        "-D",
        data,
        "-A",
        "trust",
        "-U",
        "hangwatch",
        "--no-sync",
        "-E",
        "UTF8",
    )
    options = f"-k {folder} -c listen_addresses= -c fsync=off"
    run_as_postgres(str(programs / "pg_ctl"), "-D", data, "-l", log, "-o", options, "-w", "start")
    try:
        yield f"postgresql://hangwatch@/postgres?host={folder}"
    finally:
        run_as_postgres(str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


def clear_database(url: str) -> None:
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as db:
        db.execute(sa.text("DROP SCHEMA public CASCADE; CREATE SCHEMA public"))
    engine.dispose()
