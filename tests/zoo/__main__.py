"""Runs the zoo and prints its verdicts, with precision, recall and seconds to verdict: ``python -m
tests.zoo``. With ``--backend nccl`` the programs of tests/zoo/nccl; with ``--soak MINUTES`` the healthy
ones at random.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hangwatch.agent.recorder.native.cache import get_cache_dir
from tests.fakegpu.environment import environment_folder
from tests.harness import expected
from tests.harness.depth import SEED_VARIABLE, Depth, choose_seed, draw_depth
from tests.harness.environments import is_installed
from tests.harness.expected import ExpectedVerdict
from tests.harness.job import PTRACE_REFUSED, THIS_RUNTIME, TorchRuntime
from tests.harness.native import build_plugin, build_recorder
from tests.harness.server import ServerPool
from tests.harness.verdicts import ProgramOutcome, check_program

from . import nccl, peers, soak
from .runs import run_programs

HEALTHY_KIND = "healthy"
EXIT_NOT_INSTALLED = 5
DEFAULT_NCCL_TORCH = "2.14.1"
JOB_COUNT = 4
# As few already keep both cores of a small machine busy: a soak has no turns for imports.
SOAK_JOB_COUNT = 2
SOAK_MINUTES = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    programs = arguments.programs
    if _needs_installation(arguments):
        print(
            f"torch {arguments.torch} is not installed: python -m tests.fakegpu install --torch"
            f" {arguments.torch}",
            file=sys.stderr,
        )
        return EXIT_NOT_INSTALLED
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # or the jobs under way would stay
    chosen = [name for name, program in programs.items() if _is_wanted(name, program, arguments)]
    if arguments.depth is None:
        print(f"seed {arguments.seed}: --seed {arguments.seed} makes the same calls again")
    runtime = THIS_RUNTIME if arguments.torch is None else nccl.nccl_runtime(arguments.torch)
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-zoo-") as folder,
        ServerPool(Path(folder), soak.SERVER_FLAGS if arguments.soak else ()) as servers,
    ):
        if arguments.recorder:
            os.environ["HANGWATCH_RECORDER"] = arguments.recorder
        if arguments.recorder == "native":
            build_recorder(get_cache_dir(os.environ), runtime)
        if arguments.backend == "nccl":
            build_plugin(get_cache_dir(os.environ), runtime)
        run_program = partial(_run_program, _choose_runner(arguments, runtime, servers), arguments)
        if arguments.soak:
            return soak.run_soak(
                programs,
                [name for name in chosen if programs[name].healthy],
                run_program,
                servers,
                minutes=arguments.soak,
                seed=arguments.seed,
                job_count=arguments.jobs or SOAK_JOB_COUNT,
            )
        return run_programs(
            programs,
            [name for _ in range(arguments.repeat) for name in chosen],
            partial(run_program, seed=arguments.seed),
            job_count=arguments.jobs or JOB_COUNT,
            shows_details=arguments.details,
        )


def _run_program(
    runner: Callable[..., ProgramOutcome],
    arguments: argparse.Namespace,
    name: str,
    folder: Path,
    seed: int,
) -> ProgramOutcome:
    depth = draw_depth(name, seed)
    if arguments.depth is not None:
        depth = Depth(calls=arguments.depth, seed=depth.seed)
    return runner(name, folder, stall_after_s=arguments.stall_after, depth=depth)


def _needs_installation(arguments: argparse.Namespace) -> bool:
    return arguments.torch not in (None, nccl.OWN_GPUS) and not is_installed(
        environment_folder(arguments.torch)
    )


def _choose_runner(
    arguments: argparse.Namespace, runtime: TorchRuntime, servers: ServerPool
) -> Callable[..., ProgramOutcome]:
    if arguments.peer:
        return partial(peers.check_with_peer, arguments.peer)
    if arguments.without_pyspy:
        runtime = replace(runtime, command_prefix=PTRACE_REFUSED)
    if arguments.soak:
        return partial(check_program, runtime=runtime, use_server=servers.use, env=soak.JOB_ENV)
    # One job imports torch at a time, while others wait: they would take each other's cores.
    return partial(
        check_program, runtime=runtime, use_server=servers.use, launch_turn=threading.Lock()
    )


def _load_programs(backend: str) -> dict[str, ExpectedVerdict]:
    return {
        name: expected.load_expected(name)
        for is_healthy in (False, True)
        for name in expected.list_programs(healthy=is_healthy, backend=backend)
    }


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo", description="Real hangs and healthy jobs, and their verdicts."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="programs by name (all); tests/zoo has a folder for each",
    )
    parser.add_argument("--kind", action="append", help="all of a kind; repeatable")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="(gloo)")
    parser.add_argument(
        "--torch",
        metavar="VERSION",
        help="a version that tests.fakegpu installed, which runs without a GPU; or"
        f" {nccl.OWN_GPUS}, with nccl: this interpreter's, on this machine's GPUs (with nccl"
        f" {DEFAULT_NCCL_TORCH}; with gloo this interpreter's)",
    )
    parser.add_argument(
        "--ci", action="store_true", help="only the representative part that the tests run"
    )
    parser.add_argument(
        "--jobs", type=int, help=f"programs at a time ({JOB_COUNT}; with --soak {SOAK_JOB_COUNT})"
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs of each (1)")
    parser.add_argument(
        "--soak",
        type=float,
        nargs="?",
        const=SOAK_MINUTES,
        metavar="MINUTES",
        help=f"for so long ({SOAK_MINUTES:g}) the healthy programs at random, starts at the same time"
        " included, on a server that ends hung ranks: no alert, no kill",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=choose_seed(),
        help="from which the number of calls before each fault is drawn, 300 to 5,000, and which"
        f" calls they are (${SEED_VARIABLE}, or a new one)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        metavar="CALLS",
        help="as many calls before each fault; 0: none, as the programs are written",
    )
    parser.add_argument(
        "--recorder",
        choices=("python", "native"),
        help="the native one is built first ($HANGWATCH_RECORDER, or python)",
    )
    parser.add_argument(
        "--stall-after", type=float, default=4.0, help="the server's limit in seconds (4)"
    )
    parser.add_argument(
        "--peer",
        choices=peers.PEERS,
        help="under this tool of PyTorch's, without hangwatch (analyze: its dumps)",
    )
    parser.add_argument(
        "--without-pyspy",
        action="store_true",
        help="where ptrace is refused, as in most containers: the ranks write their own stacks",
    )
    parser.add_argument(
        "--details", action="store_true", help="the incidents and logs of those that fail"
    )
    arguments = parser.parse_args(argv)
    arguments.programs = programs = _load_programs(arguments.backend)
    if arguments.backend == "nccl":
        arguments.torch = arguments.torch or DEFAULT_NCCL_TORCH
        arguments.names = [name if "/" in name else f"nccl/{name}" for name in arguments.names]
        if arguments.peer:
            parser.error("--peer runs the programs for gloo")
    if arguments.soak is not None and (arguments.soak <= 0 or arguments.peer):
        parser.error("--soak takes a positive number of minutes, and no --peer")
    if unknown := set(arguments.names) - programs.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    kinds = {_program_kind(program) for program in programs.values()}
    if unknown := set(arguments.kind or ()) - kinds:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(sorted(kinds))}")
    if (arguments.jobs is not None and arguments.jobs < 1) or arguments.repeat < 1:
        parser.error("--jobs and --repeat are at least 1")
    if arguments.soak and not any(
        program.healthy and _is_wanted(name, program, arguments)
        for name, program in programs.items()
    ):
        parser.error("--soak runs healthy programs only, and none of these is")
    return arguments


def _program_kind(program: ExpectedVerdict) -> str:
    return HEALTHY_KIND if program.healthy else program.kind


def _is_wanted(name: str, program: ExpectedVerdict, arguments: argparse.Namespace) -> bool:
    if program.stand_ins_only and arguments.torch == nccl.OWN_GPUS:
        return False
    by_choice = not arguments.names and not arguments.kind
    return (
        by_choice or name in arguments.names or _program_kind(program) in (arguments.kind or ())
    ) and (program.ci or not arguments.ci)


if __name__ == "__main__":
    sys.exit(main())
