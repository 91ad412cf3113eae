"""Tests a real server with schemathesis, by its OpenAPI description: ``python -m
tests.benchmarks.openapi``.

With the token and without it: there must be no 5xx and nothing that the description does not
contain, and without the token nothing that is not public.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.harness.processes import clean_environment
from tests.harness.server import run_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import make_hung_job

OPEN_PATHS = {"/healthz", "/readyz"}  # besides the login page, which is no part of the API
EXAMPLES_PER_OPERATION = 600  # for each operation: more than 20,000 requests in all
# No schema expresses what must hold beyond types, such as that a cursor exists or a job reports.
EXCLUDED_CHECKS = "positive_data_acceptance"
ALL_PHASES = "examples,coverage,fuzzing"


@dataclass(slots=True, kw_only=True)
class SchemathesisRun:
    """What became of one run of schemathesis."""

    status: int
    output: str
    answers_by_status: Counter[int] = field(default_factory=Counter)  # by status
    served_paths: set[str] = field(
        default_factory=set
    )  # paths that were answered with neither 401 nor 405


def run_schemathesis(
    url: str, token: str | None, examples: int, folder: Path, phases: str = ALL_PHASES
) -> SchemathesisRun:
    """Sends requests made from the description at ``url``; ``folder`` takes the report."""
    har = folder / f"{secrets.token_hex(4)}.har"
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", str(folder / "openapi.json"), "--url", url,
        # streams without an end
        "--exclude-path", "/api/v1/events", "--exclude-path", "/api/v1/trace",
        "--exclude-checks", EXCLUDED_CHECKS, "--phases", phases, "--max-examples", str(examples),
        "--seed", "1", "--no-color", "--warnings", "off", "--report-har-path", str(har), "--request-timeout", "60",
    ]  # fmt: skip
    if token is not None:
        command += ["--header", f"Authorization: Bearer {token}"]
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
    )
    run = SchemathesisRun(status=done.returncode, output=done.stdout + done.stderr)
    for entry in json.loads(har.read_text())["log"]["entries"]:
        status = int(entry["response"]["status"])
        run.answers_by_status[status] += 1
        if status not in (401, 405):
            run.served_paths.add(urlsplit(entry["request"]["url"]).path)
    return run


def run_with_and_without_token(
    folder: Path, examples: int, phases_without_token: str = ALL_PHASES
) -> tuple[SchemathesisRun, SchemathesisRun]:
    """A run with the token and one without, against a server with an open incident."""
    token = secrets.token_urlsafe()
    with run_server(folder, f"--token={token}", "--stall-after", "1") as server:
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(
            base_url=server.url, trust_env=False, headers=headers, timeout=30
        ) as client:
            (folder / "openapi.json").write_text(
                client.get("/openapi.json").raise_for_status().text
            )
            reporter = JobReporter(client, make_hung_job())
            reporter.send_until(reporter.list_incidents, "an incident to request")
        return run_schemathesis(server.url, token, examples, folder), run_schemathesis(
            server.url, None, examples, folder, phases_without_token
        )


def list_problems(with_token: SchemathesisRun, without: SchemathesisRun) -> list[str]:
    """What does not hold."""
    problems = []
    if with_token.status:
        problems.append(f"with the token:\n{with_token.output}")
    for name, run in (("with", with_token), ("without", without)):
        problems += [
            f"{name} the token: {count} answers {status}"
            for status, count in run.answers_by_status.items()
            if status >= 500
        ]
    problems += [
        f"without the token {path} was served" for path in sorted(without.served_paths - OPEN_PATHS)
    ]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--examples",
        type=int,
        default=EXAMPLES_PER_OPERATION,
        help="for each operation (default: %(default)s)",
    )
    examples = parser.parse_args().examples
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        runs = run_with_and_without_token(Path(folder), examples)
        for name, run in zip(("with the token", "without it"), runs, strict=True):
            answer_counts = ", ".join(
                f"{count} x {status}" for status, count in sorted(run.answers_by_status.items())
            )
            print(f"{name}: {run.answers_by_status.total()} requests: {answer_counts}")
        problems = list_problems(*runs)
        print(*problems, f"{len(problems)} problems in {time.monotonic() - began:.0f} s", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
