"""hangwatch-server with one of the event loops: ``python serving_variant.py {asyncio,uvloop} FLAGS...``.
`tests.benchmarks.serving` runs it.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import uvicorn

from hangwatch.server import main

if __name__ == "__main__":
    event_loop = sys.argv.pop(1)

    class LoopConfig(uvicorn.Config):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "loop": event_loop})

    with mock.patch.object(uvicorn, "Config", LoopConfig):
        sys.exit(main.main())
