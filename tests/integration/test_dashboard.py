"""The dashboard in a real browser, with a real server and a real hung job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from hangwatch.model.ranks import ExceptionInfo, Frame
from tests.harness import job
from tests.harness.browser import (
    BROWSER_TIMEOUT_S,
    click_element,
    get_text,
    list_accessibility_violations,
    list_console_errors,
    open_browser,
    wait_until_shown,
)
from tests.harness.server import running_server
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedGroup, SimulatedJob
from tests.simulation.waiting import wait_until

PROGRAM = Path(__file__).with_name("dashboard_program.py")
PLANTED_LINE = next(
    n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# PLANTED")
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with open_browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def browser(chromium: WebDriver) -> Iterator[WebDriver]:
    """A blank page; the test fails if the console has errors at its end."""
    chromium.get("about:blank")
    list_console_errors(chromium)
    yield chromium
    while len(chromium.window_handles) > 1:
        chromium.close()
        chromium.switch_to.window(chromium.window_handles[0])
    assert list_console_errors(chromium) == []


def test_dashboard_from_empty_page_to_resolved_incident(browser: WebDriver, tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server:
        browser.get(f"{server.url}/ranks")
        assert f"HANGWATCH_URL={server.url} torchrun" in wait_until_shown(
            browser, "main", "No job has reported yet"
        )
        assert list_accessibility_violations(browser) == []
        with job.running_job(
            PROGRAM, 4, tmp_path / "job", server.url, env={"DASHBOARD_FOLDER": str(tmp_path)}
        ):
            well = wait_until_shown(browser, "#verdict h1", "steps per second", 60)
            assert well.startswith("All is well: 4 of 4 ranks report")
            (tmp_path / "HANG").touch()
            verdict = wait_until_shown(browser, "#verdict h1", "rank 2 has not entered all_reduce")
            assert "3 ranks wait" in verdict
            assert (
                f"it is at dashboard_program.py:{PLANTED_LINE} in load_batch"
                in wait_until_shown(browser, "#verdict h1", "it is at")
            )
            wait_until_shown(browser, "#verdict .place", f"dashboard_program.py:{PLANTED_LINE}")
            _check_map_and_table(browser)
            assert list_accessibility_violations(browser) == []
            browser.get(f"{server.url}/ranks?view=groups")
            assert "1 behind" in wait_until_shown(browser, "#table", "rank 2")
            assert list_accessibility_violations(browser) == []
            click_element(browser, "#verdict .button")
            wait_until_shown(browser, "#verdict h1", "rank 2 has not entered")
            _check_evidence(browser)
            _check_fresh_stacks(browser)
            assert list_accessibility_violations(browser) == []
            (tmp_path / "HANG").unlink()
            wait_until_shown(browser, "#timeline", "Resolved: the job")
            assert "resolved" in get_text(browser, "#verdict .tag")
            _check_history(browser, server.url)
            (tmp_path / "FINISH").touch()
            browser.get(f"{server.url}/ranks")
            wait_until_shown(browser, "#verdict h1", "Finished: all 4 processes")
        browser.get(f"{server.url}/docs")
        wait_until_shown(browser, "h1", "API")
        assert list_accessibility_violations(browser) == []
        browser.get(f"{server.url}/incidents/none")
        wait_until_shown(browser, "h1", "Not Found")
        assert list_accessibility_violations(browser) == []


def _check_map_and_table(browser: WebDriver) -> None:
    """The culprit is marked in both, the keyboard reaches them, and the address holds the view."""
    assert "stalled\n4" in get_text(browser, "#states").replace(" ", "\n")
    assert "culprit" in get_text(browser, "#rank-2")
    canvas = browser.find_element(By.ID, "map-canvas")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert get_text(browser, "#map-readout").startswith("rank 2 · ")
    assert get_text(browser, "#map-readout").endswith("stalled · culprit")
    canvas.send_keys(Keys.ENTER)
    assert wait_until(lambda: "q=2" in browser.current_url, BROWSER_TIMEOUT_S)
    wait_until_shown(browser, "#table tbody", "culprit")
    assert browser.execute_script("return document.querySelectorAll('#table tbody tr').length") == 1
    browser.back()
    assert wait_until(
        lambda: (
            browser.execute_script("return document.querySelectorAll('#table tbody tr').length")
            == 4
        ),
        BROWSER_TIMEOUT_S,
    )
    browser.find_element(By.CSS_SELECTOR, "body").send_keys("/")
    field = browser.switch_to.active_element
    assert field.get_attribute("id") == "q"
    field.send_keys("0-1")
    assert wait_until(lambda: "q=0-1" in browser.current_url, BROWSER_TIMEOUT_S)
    assert wait_until(
        lambda: (
            browser.execute_script("return document.querySelectorAll('#table tbody tr').length")
            == 2
        ),
        BROWSER_TIMEOUT_S,
    )
    assert browser.switch_to.active_element.get_attribute("id") == "q"
    field.send_keys(Keys.ARROW_DOWN, Keys.NULL)
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.text == "1"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.switch_to.active_element.tag_name == "body"


def _check_evidence(browser: WebDriver) -> None:
    """Graph, calls and stacks, filtered by a rank; a second page with that address shows the same."""
    assert "ranks 0-1, 3" in get_text(browser, "#graph")
    assert (
        browser.execute_script("return document.querySelector('.graph .culprit .name').textContent")
        == "rank 2"
    )
    assert "all_reduce" in get_text(browser, "#calls")
    tree = wait_until_shown(browser, "#stacks", "load_batch")
    assert "not here: 2" in tree
    users = "return [...document.querySelectorAll('.tree .user b')].map((e) => e.textContent)"
    assert browser.execute_script(users).count("load_batch") == 1
    browser.find_element(By.ID, "q").send_keys("2")
    assert wait_until(lambda: "ranks=2" in browser.current_url, BROWSER_TIMEOUT_S)
    assert wait_until(lambda: "not here" not in get_text(browser, "#stacks"), BROWSER_TIMEOUT_S)
    alone, shared = get_text(browser, "#stacks"), browser.current_url
    assert "load_batch" in alone
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    browser.get(shared)
    wait_until_shown(browser, "#stacks", "load_batch")
    assert get_text(browser, "#stacks") == alone
    browser.close()
    browser.switch_to.window(first)
    for link in browser.execute_script(
        "return [...document.querySelectorAll('.actions a')].map((a) => a.href)"
    ):
        assert httpx.get(link, trust_env=False).status_code == 200, link
    folded = httpx.get(
        f"{shared.replace('/incidents', '/api/v1/incidents').partition('?')[0]}/stacks.folded",
        trust_env=False,
    ).text
    assert any("load_batch" in line and line.endswith(" 1") for line in folded.splitlines())
    browser.execute_script(
        "document.execCommand = () => { window.copied = document.activeElement.value; }"
    )
    click_element(browser, "[data-copy]")
    assert wait_until(
        lambda: "rank 2 has not entered" in (browser.execute_script("return window.copied") or ""),
        BROWSER_TIMEOUT_S,
    )


def test_update_opens_new_details_and_keeps_what_the_reader_chose(
    browser: WebDriver, tmp_path: Path
) -> None:
    with running_server(tmp_path / "server") as server:
        browser.get(f"{server.url}/ranks")
        wait_until_shown(browser, "main", "No job has reported yet")
        opened = browser.execute_async_script(
            """
            const done = arguments[0];
            const make = (...parts) => {
              const box = document.createElement("div");
              box.innerHTML = parts.map(([name, open]) =>
                `<details${open ? " open" : ""}><summary>${name}</summary>text</details>`).join("");
              return box;
            };
            import("/static/morph.js").then(({ morphElement }) => {
              const box = make(["first", true], ["other threads", false]);
              document.body.append(box);
              box.children[0].open = false; // the reader closes it
              morphElement(box, make(["first", true], ["second", true], ["other threads", false]));
              done([...box.children].map((part) => [part.firstChild.textContent, part.open]));
            });
            """
        )
        assert opened == [["first", False], ["second", True], ["other threads", False]]


def _check_fresh_stacks(browser: WebDriver) -> None:
    field = browser.find_element(By.ID, "dump-ranks")
    field.clear()
    field.send_keys("none")
    click_element(browser, "#dump-form button")
    wait_until_shown(browser, "#dump-error", "Write them as 0, 4-7")
    field.clear()
    field.send_keys("9")
    click_element(browser, "#dump-form button")
    wait_until_shown(browser, "#dump-error", "has no rank 9")
    field.clear()
    field.send_keys("0, 2")
    click_element(browser, "#dump-form button")
    assert "load_batch" in wait_until_shown(browser, "#dump", "Stacks of ranks 0, 2")
    assert "dump=" in browser.current_url
    field.clear()
    field.send_keys("2")
    click_element(browser, "#dump-native")
    click_element(browser, "#dump-form button")
    assert "load_batch" in wait_until_shown(
        browser, "#dump", "Stacks of rank 2, with native frames", 60
    )


def _check_history(browser: WebDriver, url: str) -> None:
    browser.get(f"{url}/incidents")
    wait_until_shown(browser, "#found", "rank 2 has not entered")
    assert list_accessibility_violations(browser) == []
    browser.find_element(By.CSS_SELECTOR, "[name=kind] option[value=deadlock]").click()
    wait_until_shown(browser, "#found", "No incidents match")
    assert "kind=deadlock" in browser.current_url
    browser.get(f"{url}/incidents?kind=missing_rank&since=1h&status=resolved&job=job&rank=2")
    wait_until_shown(browser, "#found", "rank 2 has not entered")


def test_a_browser_without_the_token_gets_a_login_page(browser: WebDriver, tmp_path: Path) -> None:
    (tmp_path / "hangwatch.toml").write_text('token = "s3cret-s3cret-s3cret"\n')
    with running_server(tmp_path) as server:
        bare = str(httpx.URL(server.url).copy_with(userinfo=b"")).rstrip("/")
        browser.get(f"{bare}/incidents?status=open")
        wait_until_shown(browser, "h1", "Sign in")
        assert list_accessibility_violations(browser) == []
        browser.find_element(By.ID, "token").send_keys("wrong", Keys.ENTER)
        wait_until_shown(browser, "[role=alert]", "Invalid token")
        assert all("401" in c for c in list_console_errors(browser))
        browser.find_element(By.ID, "token").send_keys("s3cret-s3cret-s3cret", Keys.ENTER)
        wait_until_shown(browser, "h1", "Incidents")
        assert browser.current_url.endswith("/incidents?status=open")


def test_live_updates_and_reconnection(browser: WebDriver, tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        made = SimulatedJob(ranks=300)
        with JobReporter.connect(server.url, made).reporting():
            browser.get(f"{server.url}/ranks?sort=-step")
            wait_until_shown(browser, "#verdict h1", "All is well")
            browser.find_element(By.ID, "q").send_keys("node1")
            wait_until_shown(browser, "#table", "node10")
            browser.execute_script(
                "window.scrollTo(0, 200); window.kept = document.querySelector('#q')"
            )
            place = "return window.kept.getBoundingClientRect().top"
            same = "return [window.kept === document.activeElement, window.kept.value]"
            before = browser.execute_script(place)
            made.hang_ranks(7)
            wait_until_shown(browser, "#verdict h1", "rank 7 has not entered")
            assert (
                abs(browser.execute_script(place) - before) < 3
            )  # although the content above it has grown
            assert browser.execute_script(same) == [True, "node1"]
            server.stop()
            wait_until_shown(browser, "#connection", "No connection to the server. This page is")
            assert "rank 7 has not entered" in get_text(browser, "#verdict")
            server.start()
            assert wait_until(lambda: get_text(browser, "#connection") == "", BROWSER_TIMEOUT_S)
            wait_until_shown(browser, "#verdict h1", "rank 7 has not entered")
            assert browser.execute_script(same) == [True, "node1"]
            made.resume_training()
            wait_until_shown(browser, "#verdict h1", "All is well")
        wait_until_shown(browser, "#verdict", "Unknown: no node agent of this job has reported", 40)


def test_job_text_is_escaped(browser: WebDriver, tmp_path: Path) -> None:
    def make_hostile_text(where: str) -> str:
        script = f"window.pwned='{where}'"
        return (
            "</script></title><img src=x"
            f' onerror="{script}"><script>{script}</script>{{{{7*7}}}}\'"&lt;b&gt;'
        )

    with running_server(tmp_path, stall_after_s=2) as server:
        made = SimulatedJob(
            ranks=4,
            groups=lambda _: [
                SimulatedGroup(
                    name=make_hostile_text("group"),
                    desc=make_hostile_text("description"),
                    ranks="0-3",
                )
            ],
            name=make_hostile_text("job"),
            host=make_hostile_text("host").replace("{", "{{").replace("}", "}}") + "{}",
            op=make_hostile_text("op"),
            phase=make_hostile_text("phase"),
            late_frame=Frame(
                function=make_hostile_text("function"),
                file=f"/u/{make_hostile_text('file')}.py",
                line=3,
                text=make_hostile_text("text"),
            ),
            exception=ExceptionInfo(
                type=make_hostile_text("type"), message=make_hostile_text("message")
            ),
        )
        with JobReporter.connect(server.url, made).reporting():
            browser.get(f"{server.url}/ranks")
            wait_until_shown(browser, "#verdict", "All is well")
            raised, made.exception = made.exception, None
            made.hang_ranks(2)
            wait_until_shown(browser, "#verdict .place", "window.pwned='function'")
            [incident] = server.get_items("incidents")
            pages = [
                "/ranks",
                "/ranks?view=groups",
                f"/ranks?by={httpx.QueryParams(by=make_hostile_text('description'))['by']}",
                "/incidents",
            ]
            pages.append(f"/incidents/{incident['id']}")
            _check_harmless(browser, server.url, pages)
            made.exception = raised
            assert wait_until(
                lambda: any(i["kind"] == "dead_rank" for i in server.get_items("incidents")),
                BROWSER_TIMEOUT_S,
            )
            _check_harmless(
                browser,
                server.url,
                ["/ranks", *(f"/incidents/{i['id']}" for i in server.get_items("incidents"))],
            )
            click_element(browser, "[data-up]")
        picture = server.get_text(f"incidents/{incident['id']}/stacks.svg")
        assert "<script" not in picture
        assert "<img" not in picture
        assert json.loads(server.get_text(f"incidents/{incident['id']}/stacks.speedscope.json"))[
            "profiles"
        ]


def _check_harmless(browser: WebDriver, url: str, pages: list[str]) -> None:
    for at in pages:
        browser.get(url + at)
        wait_until_shown(browser, "main", "window.pwned='job'")
        browser.execute_async_script(
            "setTimeout(arguments[0], 1200)"
        )  # until all parts have been updated
        assert browser.execute_script("return window.pwned") is None, at
        assert (
            browser.execute_script("return document.querySelectorAll('img, main script').length")
            == 0
        ), at
        assert "{{7*7}}" in get_text(browser, "main"), at
    assert list_console_errors(browser) == []


def test_phone_layout_has_no_horizontal_scrolling(browser: WebDriver, tmp_path: Path) -> None:
    with running_server(tmp_path, stall_after_s=2) as server:
        made = SimulatedJob(
            ranks=64,
            host="a-host-with-a-rather-long-name-{}.cluster.example",
        )
        made.hang_ranks(5)
        with JobReporter.connect(server.url, made).reporting():
            browser.set_window_size(390, 844)
            try:
                browser.get(f"{server.url}/ranks")
                wait_until_shown(browser, "#verdict .place", "load_batch")
                [incident] = server.get_items("incidents")
                for at in (
                    "/ranks",
                    "/ranks?view=groups",
                    "/incidents",
                    f"/incidents/{incident['id']}",
                ):
                    browser.get(server.url + at)
                    wait_until_shown(browser, "main", "rank 5 has not entered")
                    assert browser.execute_script(
                        "return document.documentElement.scrollWidth <= innerWidth"
                    ), at
            finally:
                browser.set_window_size(1280, 900)
