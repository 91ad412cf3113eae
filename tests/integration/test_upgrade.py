"""A database of each released version is opened by this one, with nothing lost."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.harness.processes import clean_environment
from tests.harness.server import running_server

DATABASES = sorted((Path(__file__).parent / "databases").glob("*.sql"))
DATABASE_NAME = "hangwatch.sqlite3"


@pytest.mark.parametrize("dump", DATABASES, ids=lambda path: path.stem)
def test_database_of_a_release_is_upgraded(dump: Path, tmp_path: Path) -> None:
    data = tmp_path / "server/data"
    data.mkdir(parents=True, mode=0o700)
    with sqlite3.connect(data / DATABASE_NAME) as connection:
        connection.executescript(dump.read_text())
        ((text,),) = connection.execute("SELECT body FROM incidents").fetchall()
    connection.close()
    before = json.loads(text)
    with running_server(tmp_path / "server") as server:
        (listed,) = server.get_items("incidents")
        after = server.get(f"incidents/{listed['id']}")
        for key in ("id", "job", "kind", "summary", "advice", "culprits", "waiting", "onset_at"):
            assert after[key] == before[key]
        assert len(after["stacks"]) == len(before["stacks"])
        page = httpx.get(f"{server.url}/incidents/{after['id']}", headers={"Accept": "text/html"})
        assert page.status_code == 200 and "load_batch" in page.text
        (attempt,) = server.get_items("attempts")
        assert (attempt["job"], attempt["world_size"]) == ("run7", 4)
        shown = subprocess.run(
            [sys.executable, "-m", "hangwatch.agent.cli", "show", "--url", server.url],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert before["summary"].split(",")[0][:60] in " ".join(shown.stdout.split())
    with running_server(tmp_path / "server") as again:
        assert again.get(f"incidents/{before['id']}")["summary"] == before["summary"]
