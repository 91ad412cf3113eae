"""`python -m tests.fakegpu install|build|run`: fetches a CUDA torch, builds the stand-ins for it, runs a program on them.

Exit codes: 0 done · 1 error · 2 usage · 5 the torch wheel cannot be fetched. `run` returns the program's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.fakegpu.build import build_libraries
from tests.fakegpu.environment import (
    WheelUnavailableError,
    environment_folder,
    install_environment,
    library_folder,
)
from tests.fakegpu.launch import job_environment
from tests.harness.environments import python_of

EXIT_WHEEL_UNAVAILABLE = 5


def main() -> int:
    """Run one command; see the module's docstring."""
    options = _parser().parse_args()
    try:
        if options.command == "install":
            return _install(options)
        if options.command == "build":
            print(build_libraries(options.torch_python, options.out))
            return 0
        return _run(options)
    except WheelUnavailableError as error:
        print(error, file=sys.stderr)
        return EXIT_WHEEL_UNAVAILABLE
    except (subprocess.CalledProcessError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fakegpu")
    commands = parser.add_subparsers(dest="command", required=True)
    install = commands.add_parser(
        "install", help="create an environment with a CUDA torch, and its stand-ins"
    )
    install.add_argument("folder", type=Path, nargs="?", help="default: in the cache")
    install.add_argument("--torch", default="2.14.1", metavar="VERSION")
    build = commands.add_parser("build", help="generate and compile the stand-ins")
    build.add_argument("--torch-python", type=Path, required=True)
    build.add_argument("--out", type=Path, required=True)
    run = commands.add_parser("run", help="run a program, such as torchrun, on the stand-ins")
    run.add_argument("--torch", default="2.14.1", metavar="VERSION", help="an installed version")
    run.add_argument("--faults", default="", help="for example 'stall:call=20;slow:ms=50,rank=1'")
    run.add_argument("--devices", type=int, help="GPUs that the machine seems to have (8)")
    run.add_argument("--memory-mb", type=int, help="memory of each (16384)")
    run.add_argument(
        "--queue-depth",
        type=int,
        help="launches that a stream queues before the host blocks (1024)",
    )
    run.add_argument("program", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    return parser


def _install(options: argparse.Namespace) -> int:
    folder = options.folder or environment_folder(options.torch)
    install_environment(folder, options.torch)
    build_libraries(python_of(folder), library_folder(options.torch))
    print(folder)
    return 0


def _run(options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        print("no program given", file=sys.stderr)
        return 2
    environment = job_environment(options.torch, faults=options.faults)
    switches = {
        "FAKEGPU_DEVICES": options.devices,
        "FAKEGPU_MEMORY_MB": options.memory_mb,
        "FAKEGPU_QUEUE_DEPTH": options.queue_depth,
    }
    environment |= {name: str(value) for name, value in switches.items() if value is not None}
    os.execvpe(program[0], program, environment)


if __name__ == "__main__":
    sys.exit(main())
