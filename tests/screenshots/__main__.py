"""Takes README's pictures, of real hangs under torchrun on a real server: ``python -m
tests.screenshots [NAME...]``.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from selenium.webdriver.remote.webdriver import WebDriver

from tests.harness import expected, job
from tests.harness.browser import browsing, until_shown
from tests.harness.processes import eventually
from tests.harness.server import Server, serving

HERE = Path(__file__).parent
START_S = 90.0  # until the fault, on a busy machine
VERDICT_S = 30.0
STALL_AFTER = 4.0
WIDTH, HEIGHT = 1060, 1040  # pixels, at most so high
MOST_BYTES = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Of a program of tests/zoo. ``evidence`` for the incident's page, else the ranks'; ``part`` is
    the last to be seen of it.
    """

    program: str
    evidence: bool
    part: str


PICTURES = {
    "missing_rank": Picture(program="dataloader_stuck", evidence=False, part="#table"),
    "mismatch": Picture(program="another_op", evidence=True, part="#calls .scroll"),
    "deadlock": Picture(program="deadlock_two_groups", evidence=True, part="#graph"),
}


def take(name: str, folder: Path, browser: WebDriver) -> bytes:
    """Hangs the job of a picture, and returns what the dashboard shows of it. Raises AssertionError
    where that is not the verdict.
    """
    told = PICTURES[name]
    ranks = expected.load(told.program).ranks
    script = folder / "train.py"
    script.parent.mkdir()
    script.write_text(expected.program(told.program).read_text().replace(f"  {expected.MARK}", ""))
    with (
        serving(folder / "server", STALL_AFTER) as server,
        job.running(script, ranks, folder / "job", server.url, name="finetune") as hung,
    ):
        assert eventually(lambda: hung.planted_at is not None, START_S), (
            f"{told.program} never came to its fault: {hung.stderr}"
        )
        assert eventually(lambda: not problems(server, told.program), VERDICT_S), problems(
            server, told.program
        )
        [incident] = server.items("incidents")
        browser.get(
            f"{server.url}/incidents/{incident['id']}" if told.evidence else f"{server.url}/ranks"
        )
        until_shown(browser, "#verdict .place", script.name)
        return photograph(browser, told.part)


def problems(server: Server, program: str) -> list[str]:
    """In what the server's verdict is not yet the expected one, with the culprits' stacks."""
    incidents = [server.get(f"incidents/{listed['id']}") for listed in server.items("incidents")]
    if len(incidents) != 1:
        return [f"{len(incidents)} incidents"]
    [found] = incidents
    seen = {rank for stack in found["stacks"] if stack["frames"] for rank in stack["ranks"]}
    unseen = [f"no stack of rank {rank}" for rank in found["culprits"] if rank not in seen]
    return (
        expected.differences(program, replace(expected.load(program), where=None, advice=()), found)
        + unseen
    )


def photograph(browser: WebDriver, part: str) -> bytes:
    """The page as PNG, from its top to the end of a part."""
    end: float = browser.execute_script(
        "window.scrollTo(0, 0); return document.querySelector(arguments[0]).getBoundingClientRect().bottom",
        part,
    )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(HEIGHT, end + 20), "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    return base64.b64decode(shot["data"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.screenshots", description="Takes README's pictures of real hangs."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (all)")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="the folder for them (tests/screenshots)"
    )
    told = parser.parse_args()
    if unknown := set(told.names) - PICTURES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with (
        tempfile.TemporaryDirectory(prefix="finetune-") as folder,
        browsing(Path(folder, "profile"), width=WIDTH) as browser,
    ):
        for name in told.names or PICTURES:
            taken = take(name, Path(folder, name), browser)
            assert len(taken) <= MOST_BYTES, f"{name} takes {len(taken)} bytes"
            path = told.out / f"{name}.png"
            path.write_bytes(taken)
            print(f"{path}: {len(taken) / 1024:.0f} KiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
