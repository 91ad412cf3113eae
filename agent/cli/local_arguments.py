"""The subcommands that work on this machine: demo, analyze and doctor."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from .subcommands import Subcommands


def add_demo(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "demo",
        _run_demo,
        help="show on this machine what a verdict looks like, in under a minute",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the server and the hung job running until Ctrl-C"
    )


def _run_demo(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .demo.command import run_demo

    return run_demo(args, env)


def add_analyze(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "analyze",
        _run_analyze,
        help="the diagnosis from files: Flight Recorder dumps, or a bundle",
        description=(
            "Diagnoses from files, without a server and without the job: PyTorch Flight Recorder"
            " dumps (pickle or JSON), one for each rank, or a bundle that hangwatch wrote. Ranks may"
            " be missing. Files that cannot be read are reported and skipped."
        ),
        epilog=(
            "Exit codes: 0 no hang found, 1 no file could be read or a file tries to run code,"
            " 2 usage, 4 a hang. torch keeps the calls for dumps if TORCH_FR_BUFFER_SIZE (formerly"
            " TORCH_NCCL_TRACE_BUFFER_SIZE) is above 0. `curl -O` of /api/v1/incidents/ID/bundle"
            " downloads a bundle."
        ),
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="dumps whose names end with their rank, bundles, or folders of these",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the calls of a single bundle to DIR as Flight Recorder dumps",
    )


def _run_analyze(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .analyze.command import run_analyze

    return run_analyze(args, env)


def add_token(subcommands: Subcommands) -> None:
    parser = subcommands.add(
        "token",
        _run_token,
        help="a token with which one job can report itself, and no other job",
        description=(
            "Prints a token for one job, derived from the server's. A job that is started with it"
            " can report itself, but no other job, and cannot read the API."
        ),
        epilog="Example: HANGWATCH_TOKEN=$(hangwatch token --job run7) HANGWATCH_JOB=run7 torchrun …",
    )
    parser.add_argument("--job", required=True, help="the job's name, as in HANGWATCH_JOB")
    parser.add_argument(
        "--token",
        help="the server's token (default: the one in HANGWATCH_URL, else HANGWATCH_TOKEN)",
    )


def _run_token(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .commands.token import print_job_token

    return print_job_token(args, env)


def add_doctor(subcommands: Subcommands) -> None:
    subcommands.add(
        "doctor",
        _run_doctor,
        has_server=True,
        help="what would keep hangwatch from working here, and the remedy",
    )


def _run_doctor(args: argparse.Namespace, env: Mapping[str, str]) -> int:
    from .doctor.command import run_doctor

    return run_doctor(args, env)
