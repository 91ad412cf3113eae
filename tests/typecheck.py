"""``python -m tests.typecheck``: mypy over the product and all tests, in the layout in which they
are installed.

``agent/`` and ``server/`` are installed as ``hangwatch.agent`` and ``hangwatch.server``. mypy finds
modules by their paths, so it runs in a directory of links that has this layout; else the tests,
which import the installed names, could not be checked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def link_installed_layout(target: Path) -> None:
    """Fills ``target`` with links that give the source tree its installed layout."""
    package = target / "hangwatch"
    package.mkdir()
    for path in (ROOT / "hangwatch").iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for part in ("agent", "server"):
        (package / part).symlink_to(ROOT / part)
    (target / "tests").symlink_to(ROOT / "tests")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        link_installed_layout(Path(folder))
        return subprocess.run(
            [
                *(sys.executable, "-m", "mypy"),
                *("--config-file", str(ROOT / "pyproject.toml")),
                *("--cache-dir", str(ROOT / ".mypy_cache")),
                *("hangwatch", "tests"),
                *sys.argv[1:],
            ],
            cwd=folder,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
