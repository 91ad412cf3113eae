"""Runs labelled programs, several at a time, and prints their verdicts and the score."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from tests.harness.expected import ExpectedVerdict
from tests.harness.verdicts import ProgramOutcome

from .score import format_table, score_outcomes


def run_programs(
    programs: Mapping[str, ExpectedVerdict],
    runs: Sequence[str],
    run_program: Callable[[str, Path], ProgramOutcome],
    *,
    job_count: int,
    shows_details: bool,
) -> int:
    """Runs the programs with these names, which may be repeated, each in a folder of its own. The
    exit status is 1 if any verdict is not as expected.
    """
    print(
        f"{'':>9} {'program':<34} {'calls':>5} {'verdict':<32} {'seconds':>7}  as expected",
        flush=True,
    )
    results: list[tuple[ExpectedVerdict, ProgramOutcome]] = []
    with (
        tempfile.TemporaryDirectory(prefix="hangwatch-zoo-") as folder,
        ThreadPoolExecutor(job_count) as pool,
    ):
        places = [
            (name, Path(folder, f"{name.replace('/', '-')}-{number}"))
            for number, name in enumerate(runs, 1)
        ]
        try:
            for outcome in pool.map(lambda place: run_program(*place), places):
                results.append((programs[outcome.name], outcome))
                print(f"{len(results):>4}/{len(runs):<4} {_format_row(outcome)}", flush=True)
                if shows_details and not outcome.is_ok:
                    print(outcome, flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Only the programs under way end.
    print("\n" + "\n".join([*format_table(score_outcomes(results)), *_format_summary(results)]))
    return 0 if all(outcome.is_ok for _, outcome in results) else 1


def _format_row(outcome: ProgramOutcome) -> str:
    seconds = "" if outcome.verdict_after_s is None else f"{outcome.verdict_after_s:.1f}"
    verdict = "yes" if outcome.is_ok else "NO: " + "; ".join(outcome.problems)
    return f"{outcome.name:<34} {outcome.earlier_calls:>5} {outcome.verdict:<32} {seconds:>7}  {verdict}"


def _format_summary(results: list[tuple[ExpectedVerdict, ProgramOutcome]]) -> list[str]:
    hangs = [outcome for program, outcome in results if not program.healthy]
    healthy = [outcome for program, outcome in results if program.healthy]
    definite = [
        o.verdict_after_s
        for program, o in results
        if program.latency == "at_once" and o.verdict_after_s is not None
    ]
    lines = [f"hangs: {sum(o.is_ok for o in hangs)} of {len(hangs)} as expected"] if hangs else []
    lines += (
        [f"healthy: {sum(o.is_ok for o in healthy)} of {len(healthy)} left alone"]
        if healthy
        else []
    )
    lines += (
        [f"definite kinds: median {median(definite):.1f} s, slowest {max(definite):.1f} s"]
        if definite
        else []
    )
    return lines
