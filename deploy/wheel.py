"""Builds the wheel with the native recorder and the plugin for NCCL inside, prebuilt: ``python deploy/wheel.py PYTHON...``.

Each PYTHON is an interpreter with another minor version of torch, for which the recorder is compiled
and tried; the manifest in the wheel says with which releases. With several interpreters of the same torch, the
recorder is compiled for the first and tried with all. Nothing is installed into them. The wheel is
tagged manylinux_2_28, as torch's own wheels are; `auditwheel show` checks the tag.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ("hangwatch", "agent", "server", "pyproject.toml", "README.md", "LICENSE")
PREBUILT = Path("agent/recorder/native/prebuilt")
PLATFORM = f"manylinux_2_28_{platform.machine()}"

# Run by each interpreter, with the folder for the recorders as its argument. Prints the manifest's part.
PREPARE = """
import json, os, sys
from pathlib import Path
from hangwatch.agent.recorder.native import build, cache
if why := cache.explain_unsupported():
    sys.exit(why)
library = Path(sys.argv[1]) / cache.get_prebuilt_name()
if not library.exists():
    compiler = build.find_compiler(os.environ)
    if compiler is None:
        sys.exit(build.NO_COMPILER_MESSAGE)
    try:
        build.compile_library(library, compiler, os.environ)
        cache.append_digest(library)
    except build.BuildError as error:
        sys.exit(str(error))
plugin = Path(sys.argv[1]) / cache.get_prebuilt_plugin_name()
if not plugin.exists():
    try:
        build.compile_plugin(plugin, build.find_compiler(os.environ) or ["c++"], os.environ)
        cache.append_digest(plugin)
    except build.BuildError as error:
        sys.exit(str(error))
try:
    cache.verify_library(library)
    build.check_library(library, os.environ)
except (OSError, build.BuildError) as error:
    sys.exit(f"{library.name} does not work here: {error}")
import torch
print(json.dumps({
    "library": library.name,
    "releases": cache.describe_releases(),
    "sources": cache.hash_sources(),
    "plugin_sources": cache.hash_plugin_sources(),
    "torch": torch.__version__,
}))
"""


class WheelError(Exception):
    """What went wrong, and with which interpreter."""


def build_wheel(pythons: list[str], out: Path) -> Path:
    """The wheel, in ``out``. Raises WheelError."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hangwatch-wheel-") as folder:
        source = Path(folder, "source")
        _copy_tree(source)
        pure = _run_build(source, Path(folder, "pure"))
        library = Path(folder, "library")
        shutil.unpack_archive(pure, library, "zip")
        _prepare_recorders(pythons, library, source / PREBUILT)
        wheel = _run_build(source, Path(folder, "wheel"), PLATFORM)
        return Path(shutil.copy2(wheel, out))


def _copy_tree(target: Path) -> None:
    """A copy, since a build leaves folders behind."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)


def _prepare_recorders(pythons: list[str], library: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recorders: dict[str, list[dict[str, str]]] = {}
    hashes: dict[str, str] = {}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HANGWATCH_")}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(library), *filter(None, [environment.get("PYTHONPATH")])]
    )
    for python in pythons:
        found_at = shutil.which(python)
        if found_at is None:
            raise WheelError(f"there is no interpreter {python}")
        done = subprocess.run(
            [os.path.abspath(found_at), "-c", PREPARE, str(folder)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise WheelError(f"{python}: {done.stderr.strip().splitlines()[-1]}")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        hashes = {name: found[name] for name in ("sources", "plugin_sources")}
        recorders.setdefault(found["library"], []).append(found["releases"])
        print(f"{found['library']}: works with torch {found['torch']}", file=sys.stderr, flush=True)
    manifest = {**hashes, "recorders": recorders}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _run_build(source: Path, out: Path, tag: str = "") -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    if tag:
        command.append(f"--config-setting=--build-option=--plat-name={tag}")
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(done.stdout[-2000:] + done.stderr[-2000:])
    (wheel,) = out.glob("*.whl")
    return wheel


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python deploy/wheel.py", description=(__doc__ or "").partition(":")[0] + "."
    )
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter with a torch")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="(dist)")
    args = parser.parse_args()
    try:
        print(build_wheel(args.pythons, args.out))
    except WheelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
