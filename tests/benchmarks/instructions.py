"""What hangwatch adds in instructions, which other load on the machine does not change: ``python -m
tests.benchmarks.instructions``.

Runs the scripts of `workload` one after another, with rank 0 under valgrind's callgrind, which
counts the instructions in user space exactly. It counts only while the script works, so the numbers
do not include its start. The other rank of a job of two runs at its own speed, about fifty times
faster, so the counted one never waits for it.

Threads are counted separately. Work at fixed times, such as that of the recorder's thread ten times
a second, would be counted fifty times too often in relation to calls and steps that valgrind slows
down. So the cost of a second of that thread is measured, and a step is charged with as many seconds
as it takes without valgrind.

valgrind is again about fifty times slower with fused multiply-add instructions. So MKL runs without
them, and with four numbers at a time instead of up to sixteen: its part of a step has up to eight
times as many instructions as normally. Therefore the limit is applied to an eighth of the
instructions of a step.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.harness.server import running_server

from .turns import (
    BARE,
    BARE_AGAIN,
    BOTH,
    FLIGHT,
    FLIGHT_OFF,
    NATIVE,
    PYTHON,
    JobFigures,
    Script,
    TurnBench,
    Variant,
    add_only_option,
    describe_machine,
    format_percent,
    median_of_sets,
    select_scripts,
    without_flight_recorder,
)

MAX_STEP_PERCENT = 0.5
_MKL_CBWR_FACTOR = 8  # times the instructions of a step, at most, for MKL_CBWR

WAYS = (*without_flight_recorder(BARE, BARE_AGAIN, NATIVE, PYTHON), FLIGHT, BOTH)

NOTHING = Script(
    title="all_reduce on a backend that does nothing", what="calls", count=1_000, ranks=1, key="call_ns", unit=1e3,
    ways=WAYS[:4],  # the Flight Recorder does not see it
)  # fmt: skip
GLOO = Script(
    title="all_reduce on gloo",
    what="gloo calls",
    count=1_000,
    ranks=1,
    key="call_ns",
    unit=1e3,
    ways=WAYS,
)
# With 4 steps, two counts differ by 0.1 %, more than the difference to be measured.
STEP = Script(
    title="DDP step, two ranks on gloo",
    what="steps",
    count=20,
    ranks=2,
    key="wall_s",
    unit=1e-3,
    ways=WAYS,
)
SCRIPTS = (NOTHING, GLOO, STEP)

_MARKS_SOURCE = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; }
void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""
# Without fair scheduling the recorder's thread does not get a turn for seconds.
_VALGRIND_OPTIONS = (
    "--tool=callgrind --quiet --fair-sched=yes --instr-atstart=no --separate-threads=yes"
    " --compress-strings=no"
)
_RUNS_PYTHON = "_PyEval_EvalFrameDefault"


class CountingUnavailableError(Exception):
    """A tool needed for counting is missing. The message says how to install it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionCounts:
    """Instructions of a rank: for each call or step, and for each second in the recorder's own
    thread.
    """

    per_call: float
    per_recorder_second: float


def build_marks(folder: Path) -> Path:
    """Builds the library with which a script starts and stops counting in callgrind. Raises
    CountingUnavailableError.
    """
    library = folder / "marks.so"
    for needed in ("valgrind", "cc"):
        if shutil.which(needed) is None:
            raise CountingUnavailableError(
                f"there is no {needed} here; apt-get install valgrind gcc libc6-dev"
            )
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    compilation = subprocess.run(
        command, input=_MARKS_SOURCE, capture_output=True, text=True, check=False
    )
    if compilation.returncode:
        raise CountingUnavailableError(
            f"valgrind's headers, which come with its package, do not compile:\n{compilation.stderr}"
        )
    return library


@dataclass(slots=True, kw_only=True)
class InstructionCounter:
    """Counts jobs of ``bench``, one at a time."""

    bench: TurnBench
    marks: Path

    def count_instructions(self, script: Script, way: Variant) -> InstructionCounts:
        """Raises RuntimeError if the job failed, or if the recorders that ran are not those of
        ``way``.
        """
        with tempfile.TemporaryDirectory(prefix="counted-", dir=self.bench.folder) as name:
            folder = Path(name)
            env = {
                "PYTHON_EXEC": str(_write_interpreter(folder)),
                "BENCHMARK_MARKS": str(self.marks),
            }
            figures = self._run_turn(
                script,
                replace(
                    way, env={**way.env, **env, "PYTHONHASHSEED": "0", "MKL_CBWR": "COMPATIBLE"}
                ),
            )
            if bool(figures.final_numbers["flight_recorder"]) == (
                way.env.items() >= FLIGHT_OFF.items()
            ):
                raise RuntimeError(
                    f"{way.name}: the Flight Recorder has {figures.final_numbers['flight_recorder']:g}"
                    " calls"
                )
            workload_total = recorder_total = 0
            for thread in folder.glob("callgrind.*-*"):
                text = thread.read_text()
                total = int(re.findall(r"^totals: (\d+)$", text, re.MULTILINE)[-1])
                if _RUNS_PYTHON in text and not thread.name.endswith("-01"):
                    recorder_total += total
                else:
                    workload_total += total
        call_count = script.count + (script is STEP)  # its first one in a turn is not timed
        return InstructionCounts(
            per_call=workload_total / call_count,
            per_recorder_second=recorder_total / figures.turns[0]["counted_s"],
        )

    def measure_step_s(self) -> float:
        """The time of a bare step without valgrind."""
        script = replace(STEP, ways=(BARE,))
        return median_of_sets(self.bench.run_sets(script, 1, 5), BARE, "wall_s")

    def _run_turn(self, script: Script, way: Variant) -> JobFigures:
        """One turn of a job."""
        fresh = self.bench.run_sets(replace(script, ways=(way,)), 1, 1)[0]
        if way.name not in fresh:
            raise RuntimeError(f"{way.name} failed")
        return fresh[way.name]


def _write_interpreter(folder: Path) -> Path:
    """A Python that torchrun starts the ranks with: rank 0 is counted, thread by thread, in files
    of ``folder``.
    """
    script = folder / "python"
    counted = f"valgrind {_VALGRIND_OPTIONS} --callgrind-out-file={folder}/callgrind.%p"
    script.write_text(
        f'#!/bin/sh\n[ "$RANK" = 0 ] && set -- {counted} {sys.executable} "$@" || set --'
        f' {sys.executable} "$@"\nexec "$@"\n'
    )
    script.chmod(0o700)
    return script


def format_row(way: Variant, counted: InstructionCounts, bare: InstructionCounts) -> str:
    """A variant's instructions, and those it adds to the bare script's as a number and a share."""
    row = f"  {way.name:<44} {counted.per_call:>14,.0f}"
    if counted is not bare:
        row += (
            f" {counted.per_call - bare.per_call:>+10,.0f}"
            f" {format_percent(counted.per_call / bare.per_call):>10}"
        )
    return row + (f" {counted.per_recorder_second:>12,.0f}" if counted.per_recorder_second else "")


def judge_calls(counts: Mapping[str, InstructionCounts]) -> tuple[str, bool]:
    native, flight = (
        counts[way.name].per_call - counts[BARE.name].per_call for way in (NATIVE, FLIGHT)
    )
    return (
        f"native recorder: {format_percent(native / flight)} beside what the Flight Recorder adds",
        native <= flight,
    )


def judge_steps(counts: Mapping[str, InstructionCounts], step_s: float) -> tuple[str, bool]:
    bare, native = counts[BARE.name], counts[NATIVE.name]
    by_time = native.per_recorder_second * step_s
    added = 100 * _MKL_CBWR_FACTOR * (native.per_call - bare.per_call + by_time) / bare.per_call
    summary = (
        f"native recorder: {added:+.2f} % of an eighth, with {by_time:,.0f} of its thread in the"
        f" {1e3 * step_s:.1f} ms of a step"
    )
    return f"{summary} (<= {MAX_STEP_PERCENT:g} %)", added <= MAX_STEP_PERCENT


def judge_script(counter: InstructionCounter, script: Script) -> bool:
    """Prints the counts of a script's variants as they arrive, and whether they are within the limit."""
    print(
        f"{script.title:<46} {'instructions':>14} {'added':>10} {'ratio':>10} {'by time, /s':>12}",
        flush=True,
    )
    counts: dict[str, InstructionCounts] = {}
    for way in script.ways:
        counts[way.name] = counter.count_instructions(script, way)
        print(format_row(way, counts[way.name], counts[BARE.name]), flush=True)
    if script is NOTHING:
        return True
    summary, is_ok = (
        judge_calls(counts) if script is GLOO else judge_steps(counts, counter.measure_step_s())
    )
    print(f"  {summary}: {'ok' if is_ok else 'OVER'}", flush=True)
    return is_ok


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.instructions",
        description="What watching adds, in instructions.",
    )
    add_only_option(parser, SCRIPTS)
    arguments = parser.parse_args(argv)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # or the server would stay
    print(*describe_machine(), "", sep="\n")
    with tempfile.TemporaryDirectory(prefix="hangwatch-count-") as name, ExitStack() as stack:
        try:
            library = build_marks(Path(name))
        except CountingUnavailableError as error:
            print(f"instructions cannot be counted: {error}", file=sys.stderr)
            return 2
        server = stack.enter_context(running_server(Path(name, "server"), stall_after_s=60))
        counter = InstructionCounter(bench=TurnBench(Path(name), server), marks=library)
        verdicts = [judge_script(counter, script) for script in select_scripts(arguments, SCRIPTS)]
    print(
        "\nOf the first rank, for each call or step. By time: of the recorder's own thread,"
        " whatever the training does."
    )
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
