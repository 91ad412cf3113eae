"""`pip install hangwatch` installs the whole tree; an editable installation does not prove that."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"hangwatch": "hangwatch", "agent": "hangwatch/agent", "server": "hangwatch/server"}


def test_wheel_contains_all_files_and_entry_points(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a build leaves a folder behind
    tree = {
        path: path.relative_to(ROOT)
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    }
    kept = {path: name for path, name in tree.items() if "__pycache__" not in name.parts}
    for path, name in {
        **kept,
        **{ROOT / name: Path(name) for name in ("pyproject.toml", "README.md", "LICENSE")},
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(
            archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")
        )
    assert {f"{PACKAGES[name.parts[0]]}/{Path(*name.parts[1:])}" for name in kept.values()} <= names
    assert "hangwatch-server = hangwatch.server.main:main" in entry_points
    assert "[torch.backends]\nhangwatch = hangwatch.agent.activation:activate" in entry_points

    # Loaded from the wheel itself, by a Python that knows of no editable installation.
    look = "import hangwatch, sys; sys.exit(not hangwatch.__file__.startswith(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {look}", wheel],
        check=True,
        timeout=60,
    )
