"""The node agent's start, for which a rank waits."""

from __future__ import annotations

import subprocess
import sys

LATE_PACKAGES = ("hangwatch.model", "hangwatch.protocol", "hangwatch.report", "hangwatch.ring")


def test_modules_that_take_long_to_load_are_imported_after_the_fork() -> None:
    code = "import sys, hangwatch.agent.node.main; print(*sys.modules, sep='\\n')"
    loaded = subprocess.check_output((sys.executable, "-c", code), text=True).splitlines()
    assert "hangwatch.agent.node.main" in loaded
    assert not [name for name in loaded if name.startswith(LATE_PACKAGES)]
