"""``python -m tests.screenshots [NAME...]``: takes the pictures in the README and the documentation,
of real hangs under torchrun on a real server.
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
from tests.harness.server import Server, running_server
from tests.simulation.waiting import wait_until

IMAGES_DIR = Path(__file__).parents[2] / "docs" / "images"
START_TIMEOUT_S = 90.0  # the time to the fault, on a busy machine
VERDICT_TIMEOUT_S = 30.0
STALL_AFTER_S = 4.0
WIDTH_PX, MAX_HEIGHT_PX = 1060, 1040
MAX_BYTES = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A page of the dashboard while a program of tests/zoo hangs."""

    program: str
    shows_incident: bool  # the incident's page, else /ranks
    last_part: str  # selector of the last element in the picture


PICTURES = {
    "missing_rank": Picture(program="dataloader_stuck", shows_incident=False, last_part="#table"),
    "mismatch": Picture(program="another_op", shows_incident=True, last_part="#calls .scroll"),
    "deadlock": Picture(program="deadlock_two_groups", shows_incident=True, last_part="#graph"),
}


def take_picture(name: str, folder: Path, browser: WebDriver) -> bytes:
    """Hangs the picture's job and captures the dashboard as PNG. Raises AssertionError if the verdict
    is not the expected one.
    """
    picture = PICTURES[name]
    ranks = expected.load_expected(picture.program).ranks
    script = folder / "train.py"
    script.parent.mkdir()
    script.write_text(
        expected.program_path(picture.program).read_text().replace(f"  {expected.PLANTED_MARK}", "")
    )
    with (
        running_server(folder / "server", STALL_AFTER_S) as server,
        job.running_job(script, ranks, folder / "job", server.url, name="finetune") as hung,
    ):
        assert wait_until(lambda: hung.planted_at is not None, START_TIMEOUT_S), (
            f"{picture.program} did not reach its fault: {hung.stderr}"
        )
        assert wait_until(lambda: not list_problems(server, picture.program), VERDICT_TIMEOUT_S), (
            list_problems(server, picture.program)
        )
        [incident] = server.get_items("incidents")
        browser.get(
            f"{server.url}/incidents/{incident['id']}"
            if picture.shows_incident
            else f"{server.url}/ranks"
        )
        wait_until_shown(browser, "#verdict .place", script.name)
        return capture_page(browser, picture.last_part)


def list_problems(server: Server, program: str) -> list[str]:
    """What the server's verdict still lacks: the expected incident, with stacks of the culprits."""
    incidents = [
        server.get(f"incidents/{listed['id']}") for listed in server.get_items("incidents")
    ]
    if len(incidents) != 1:
        return [f"{len(incidents)} incidents"]
    [incident] = incidents
    ranks_with_stack = {
        rank for stack in incident["stacks"] if stack["frames"] for rank in stack["ranks"]
    }
    missing_stacks = [
        f"no stack of rank {rank}" for rank in incident["culprits"] if rank not in ranks_with_stack
    ]
    return (
        expected.compare_incident(
            program, replace(expected.load_expected(program), where=None, advice=()), incident
        )
        + missing_stacks
    )


def capture_page(browser: WebDriver, last_part: str) -> bytes:
    """The page as PNG, from its top to the end of an element."""
    end: float = browser.execute_script(
        "window.scrollTo(0, 0); return"
        " document.querySelector(arguments[0]).getBoundingClientRect().bottom",
        last_part,
    )
    clip = {"x": 0, "y": 0, "width": WIDTH_PX, "height": min(MAX_HEIGHT_PX, end + 20), "scale": 1}
    shot = browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    return base64.b64decode(shot["data"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.screenshots",
        description="Takes the documentation's pictures of real hangs.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)} (all)")
    parser.add_argument("--out", type=Path, default=IMAGES_DIR, help="output folder (docs/images)")
    options = parser.parse_args()
    if unknown := set(options.names) - PICTURES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with (
        tempfile.TemporaryDirectory(prefix="finetune-") as folder,
        open_browser(Path(folder, "profile"), width=WIDTH_PX) as browser,
    ):
        for name in options.names or PICTURES:
            taken = take_picture(name, Path(folder, name), browser)
            assert len(taken) <= MAX_BYTES, f"{name} takes {len(taken)} bytes"
            path = options.out / f"{name}.png"
            path.write_bytes(taken)
            print(f"{path}: {len(taken) / 1024:.0f} KiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
