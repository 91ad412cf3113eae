"""hangwatch-server with another way to serve node agents' connections: ``python serving_variant.py
{worker,asyncio,uvloop} FLAGS...``. `tests.benchmarks.serving` runs it.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import uvicorn

from hangwatch.server import main
from hangwatch.server.ingest import agent_worker


class UvloopConfig(uvicorn.Config):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "loop": "uvloop"})


if __name__ == "__main__":
    way = sys.argv.pop(1)
    min_hosts = 0 if way == "worker" else sys.maxsize  # from which on the worker process runs
    config = UvloopConfig if way == "uvloop" else uvicorn.Config
    with (
        mock.patch.object(agent_worker, "MIN_HOSTS", min_hosts),
        mock.patch.object(uvicorn, "Config", config),
    ):
        sys.exit(main.main())
