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
from tests.harness.browser import open_browser, wait_until_shown
from tests.harness.processes import wait_until
from tests.harness.server import Server, running_server

SCREENSHOTS_DIR = Path(__file__).parent
START_S = 90.0  # until the fault, on a busy machine
VERDICT_S = 30.0
STALL_AFTER_S = 4.0
WIDTH_PX, MAX_HEIGHT_PX = 1060, 1040  # pixels, at most so high
MAX_BYTES = 150_000


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


def take_picture(name: str, folder: Path, browser: WebDriver) -> bytes:
    """Hangs the job of a picture, and returns what the dashboard shows of it. Raises AssertionError
    where that is not the verdict.
    """
    told = PICTURES[name]
    ranks = expected.load_expected(told.program).ranks
    script = folder / "train.py"
    script.parent.mkdir()
    script.write_text(
        expected.program_path(told.program).read_text().replace(f"  {expected.PLANTED_MARK}", "")
    )
    with (
        running_server(folder / "server", STALL_AFTER_S) as server,
        job.running_job(script, ranks, folder / "job", server.url, name="finetune") as hung,
    ):
        assert wait_until(lambda: hung.planted_at is not None, START_S), (
            f"{told.program} never came to its fault: {hung.stderr}"
        )
        assert wait_until(lambda: not list_problems(server, told.program), VERDICT_S), (
            list_problems(server, told.program)
        )
        [incident] = server.get_items("incidents")
        browser.get(
            f"{server.url}/incidents/{incident['id']}" if told.evidence else f"{server.url}/ranks"
        )
        wait_until_shown(browser, "#verdict .place", script.name)
        return capture_page(browser, told.part)


def list_problems(server: Server, program: str) -> list[str]:
    """In what the server's verdict is not yet the expected one, with the culprits' stacks."""
    incidents = [
        server.get(f"incidents/{listed['id']}") for listed in server.get_items("incidents")
    ]
    if len(incidents) != 1:
        return [f"{len(incidents)} incidents"]
    [found] = incidents
    seen = {rank for stack in found["stacks"] if stack["frames"] for rank in stack["ranks"]}
    unseen = [f"no stack of rank {rank}" for rank in found["culprits"] if rank not in seen]
    return (
        expected.compare_incident(
            program, replace(expected.load_expected(program), where=None, advice=()), found
        )
        + unseen
    )


def capture_page(browser: WebDriver, part: str) -> bytes:
    """The page as PNG, from its top to the end of a part."""
    end: float = browser.execute_script(
        "window.scrollTo(0, 0); return"
        " document.querySelector(arguments[0]).getBoundingClientRect().bottom",
        part,
    )
    clip = {"x": 0, "y": 0, "width": WIDTH_PX, "height": min(MAX_HEIGHT_PX, end + 20), "scale": 1}
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
        "--out", type=Path, default=SCREENSHOTS_DIR, help="the folder for them (tests/screenshots)"
    )
    told = parser.parse_args()
    if unknown := set(told.names) - PICTURES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with (
        tempfile.TemporaryDirectory(prefix="finetune-") as folder,
        open_browser(Path(folder, "profile"), width=WIDTH_PX) as browser,
    ):
        for name in told.names or PICTURES:
            taken = take_picture(name, Path(folder, name), browser)
            assert len(taken) <= MAX_BYTES, f"{name} takes {len(taken)} bytes"
            path = told.out / f"{name}.png"
            path.write_bytes(taken)
            print(f"{path}: {len(taken) / 1024:.0f} KiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
