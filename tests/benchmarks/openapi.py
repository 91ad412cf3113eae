"""Tests a real server with schemathesis, by its OpenAPI description: ``python -m
tests.benchmarks.openapi``.

With the server's token, with that of a job and without one: there must be no 5xx and nothing that the
description does not contain. Without a token nothing is served that is not public, and with a job's
in addition only what a node agent needs.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from hangwatch.protocol.heartbeat import COMMANDS_PATH, HEARTBEAT_PATH, PROOF_PATH
from hangwatch.protocol.request_signing import JOB_TOKEN_PREFIX, derive_job_token
from tests.harness.processes import clean_environment
from tests.harness.server import run_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import make_hung_job

OPEN_PATHS = {"/healthz", "/readyz"}  # besides the login page, which is no part of the API
AGENT_PATHS = {HEARTBEAT_PATH, COMMANDS_PATH, PROOF_PATH}
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
    )  # paths that were answered with neither 401, 403 nor 405


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
    env = clean_environment()
    if token is not None and token.startswith(JOB_TOKEN_PREFIX):
        env |= {"SCHEMATHESIS_HOOKS": "tests.benchmarks.openapi_signing", "HANGWATCH_TOKEN": token}
        env["PYTHONPATH"] = str(Path(__file__).parents[2])
    elif token is not None:
        command += ["--header", f"Authorization: Bearer {token}"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    run = SchemathesisRun(status=done.returncode, output=done.stdout + done.stderr)
    for entry in json.loads(har.read_text())["log"]["entries"]:
        status = int(entry["response"]["status"])
        run.answers_by_status[status] += 1
        if status not in (401, 403, 405):
            run.served_paths.add(urlsplit(entry["request"]["url"]).path)
    return run


def run_with_each_token(
    folder: Path, examples: int, phases_of_others: str = ALL_PHASES
) -> dict[str, SchemathesisRun]:
    """A run with the server's token, one with a job's and one without, against a server with an open
    incident. ``phases_of_others`` are those of the last two.
    """
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
        job_token = derive_job_token(token, "another job")
        return {
            "the server's token": run_schemathesis(server.url, token, examples, folder),
            "a job's token": run_schemathesis(
                server.url, job_token, examples, folder, phases_of_others
            ),
            "no token": run_schemathesis(server.url, None, examples, folder, phases_of_others),
        }


def list_problems(runs: Mapping[str, SchemathesisRun]) -> list[str]:
    """What does not hold."""
    problems = []
    of_server = runs["the server's token"]
    if of_server.status:
        problems.append(f"with the server's token:\n{of_server.output}")
    for name, run in runs.items():
        problems += [
            f"with {name}: {count} answers {status}"
            for status, count in run.answers_by_status.items()
            if status >= 500
        ]
    for name, paths in (("no token", OPEN_PATHS), ("a job's token", OPEN_PATHS | AGENT_PATHS)):
        served_paths = sorted(runs[name].served_paths - paths)
        problems += [f"with {name}, {path} was served" for path in served_paths]
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
        runs = run_with_each_token(Path(folder), examples)
        for name, run in runs.items():
            answer_counts = ", ".join(
                f"{count} x {status}" for status, count in sorted(run.answers_by_status.items())
            )
            print(f"with {name}: {run.answers_by_status.total()} requests: {answer_counts}")
        problems = list_problems(runs)
        print(*problems, f"{len(problems)} problems in {time.monotonic() - began:.0f} s", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
