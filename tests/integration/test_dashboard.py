"""The dashboard in a real browser, before a real server and a real hung job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from hangwatch.model.ranks import ExceptionInfo
from hangwatch.model.threads import Frame
from tests.harness import job, simulated
from tests.harness.browser import PATIENCE_S, browsing, click, complaints, text, until_shown
from tests.harness.processes import eventually
from tests.harness.server import serving

PROGRAM = Path(__file__).with_name("dashboard_program.py")
PLANTED = next(
    n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# PLANTED")
)
AXE = Path(__file__).parent.parent / "vendor" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with browsing(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def browser(chromium: WebDriver) -> Iterator[WebDriver]:
    """Blank, and without a complaint in its console when the test is over."""
    chromium.get("about:blank")
    complaints(chromium)
    yield chromium
    while len(chromium.window_handles) > 1:
        chromium.close()
        chromium.switch_to.window(chromium.window_handles[0])
    assert complaints(chromium) == []


def serious(browser: WebDriver) -> list[str]:
    """What axe-core finds on the page in each theme, of serious or critical impact; and what it
    asked of other hosts.
    """
    asked = "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => !n.startsWith(location.origin))"
    found = [f"{browser.current_url} asks for {other}" for other in browser.execute_script(asked)]
    browser.execute_script(AXE.read_text())
    for theme in ("light", "dark"):
        browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        told = browser.execute_async_script(
            "axe.run().then(arguments[0], (error) => arguments[0]({error: String(error)}))"
        )
        assert "error" not in told, told
        for violation in told["violations"]:
            if violation["impact"] in ("serious", "critical"):
                nodes = "; ".join(
                    f"{n['html'][:200]} ({n['failureSummary'][:300]})"
                    for n in violation["nodes"][:3]
                )
                found.append(f"{browser.current_url}, {theme}: {violation['id']}: {nodes}")
    return found


def test_from_an_empty_page_over_the_verdict_to_its_resolution(
    browser: WebDriver, tmp_path: Path
) -> None:
    with serving(tmp_path / "server") as server:
        browser.get(f"{server.url}/ranks")
        assert f"HANGWATCH_URL={server.url} torchrun" in until_shown(
            browser, "main", "No job has reported yet"
        )
        assert serious(browser) == []
        with job.running(
            PROGRAM, 4, tmp_path / "job", server.url, env={"DASHBOARD_FOLDER": str(tmp_path)}
        ):
            well = until_shown(browser, "#verdict h1", "steps per second", 60)
            assert well.startswith("All is well: 4 of 4 ranks report")
            (tmp_path / "HANG").touch()
            told = until_shown(browser, "#verdict h1", "rank 2 has not entered all_reduce")
            assert "3 ranks wait" in told
            assert f"it is at dashboard_program.py:{PLANTED} in load_batch" in until_shown(
                browser, "#verdict h1", "it is at"
            )
            until_shown(browser, "#verdict .place", f"dashboard_program.py:{PLANTED}")
            _map_and_table(browser)
            assert serious(browser) == []
            browser.get(f"{server.url}/ranks?view=groups")
            assert "1 behind" in until_shown(browser, "#table", "rank 2")
            assert serious(browser) == []
            click(browser, "#verdict .button")
            until_shown(browser, "#verdict h1", "rank 2 has not entered")
            _evidence(browser)
            _fresh_stacks(browser)
            assert serious(browser) == []
            (tmp_path / "HANG").unlink()
            until_shown(browser, "#timeline", "It was over: the job went on")
            assert "resolved" in text(browser, "#verdict .tag")
            _history(browser, server.url)
            (tmp_path / "FINISH").touch()
            browser.get(f"{server.url}/ranks")
            until_shown(browser, "#verdict h1", "Finished: all 4 processes")
        browser.get(f"{server.url}/docs")
        until_shown(browser, "h1", "API")
        assert serious(browser) == []
        browser.get(f"{server.url}/incidents/none")
        until_shown(browser, "h1", "Not Found")
        assert serious(browser) == []


def _map_and_table(browser: WebDriver) -> None:
    """The culprit is marked in both; the keyboard reaches them; the address holds the view."""
    assert "stalled\n4" in text(browser, "#states").replace(" ", "\n")
    assert "culprit" in text(browser, "#rank-2")
    canvas = browser.find_element(By.ID, "map-canvas")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert text(browser, "#map-readout").startswith("rank 2 · ")
    assert text(browser, "#map-readout").endswith("stalled · culprit")
    canvas.send_keys(Keys.ENTER)
    assert eventually(lambda: "q=2" in browser.current_url, PATIENCE_S)
    until_shown(browser, "#table tbody", "culprit")
    assert browser.execute_script("return document.querySelectorAll('#table tbody tr').length") == 1
    browser.back()
    assert eventually(
        lambda: (
            browser.execute_script("return document.querySelectorAll('#table tbody tr').length")
            == 4
        ),
        PATIENCE_S,
    )
    browser.find_element(By.CSS_SELECTOR, "body").send_keys("/")
    field = browser.switch_to.active_element
    assert field.get_attribute("id") == "q"
    field.send_keys("0-1")
    assert eventually(lambda: "q=0-1" in browser.current_url, PATIENCE_S)
    assert eventually(
        lambda: (
            browser.execute_script("return document.querySelectorAll('#table tbody tr').length")
            == 2
        ),
        PATIENCE_S,
    )
    assert browser.switch_to.active_element.get_attribute("id") == "q"
    field.send_keys(Keys.ARROW_DOWN, Keys.NULL)
    browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.text == "1"
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert browser.switch_to.active_element.tag_name == "body"


def _evidence(browser: WebDriver) -> None:
    """Graph, calls, tree; filtered by a rank, and the same in a second page by its address."""
    assert "ranks 0-1, 3" in text(browser, "#graph")
    assert (
        browser.execute_script("return document.querySelector('.graph .culprit .name').textContent")
        == "rank 2"
    )
    assert "all_reduce" in text(browser, "#calls")
    tree = until_shown(browser, "#stacks", "load_batch")
    assert "not here: 2" in tree
    users = "return [...document.querySelectorAll('.tree .user b')].map((e) => e.textContent)"
    assert browser.execute_script(users).count("load_batch") == 1
    browser.find_element(By.ID, "q").send_keys("2")
    assert eventually(lambda: "ranks=2" in browser.current_url, PATIENCE_S)
    assert eventually(lambda: "not here" not in text(browser, "#stacks"), PATIENCE_S)
    alone, shared = text(browser, "#stacks"), browser.current_url
    assert "load_batch" in alone
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    browser.get(shared)
    until_shown(browser, "#stacks", "load_batch")
    assert text(browser, "#stacks") == alone
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
    click(browser, "[data-copy]")
    assert eventually(
        lambda: "rank 2 has not entered" in (browser.execute_script("return window.copied") or ""),
        PATIENCE_S,
    )


def _fresh_stacks(browser: WebDriver) -> None:
    field = browser.find_element(By.ID, "dump-ranks")
    field.clear()
    field.send_keys("none")
    click(browser, "#dump-form button")
    until_shown(browser, "#dump-error", "Write them as 0, 4-7")
    field.clear()
    field.send_keys("9")
    click(browser, "#dump-form button")
    until_shown(browser, "#dump-error", "has no rank 9")
    field.clear()
    field.send_keys("0, 2")
    click(browser, "#dump-form button")
    assert "load_batch" in until_shown(browser, "#asked", "Stacks of ranks 0, 2")
    assert "dump=" in browser.current_url
    field.clear()
    field.send_keys("2")
    click(browser, "#dump-native")
    click(browser, "#dump-form button")
    assert "load_batch" in until_shown(
        browser, "#asked", "Stacks of rank 2, with native frames", 60
    )


def _history(browser: WebDriver, url: str) -> None:
    browser.get(f"{url}/incidents")
    until_shown(browser, "#found", "rank 2 has not entered")
    assert serious(browser) == []
    browser.find_element(By.CSS_SELECTOR, "[name=kind] option[value=deadlock]").click()
    until_shown(browser, "#found", "No incident is in this view")
    assert "kind=deadlock" in browser.current_url
    browser.get(f"{url}/incidents?kind=missing_rank&since=1h&status=resolved&job=job&rank=2")
    until_shown(browser, "#found", "rank 2 has not entered")


def test_a_browser_without_the_token_gets_a_login_page(browser: WebDriver, tmp_path: Path) -> None:
    (tmp_path / "hangwatch.toml").write_text('token = "s3cret-s3cret-s3cret"\n')
    with serving(tmp_path) as server:
        bare = str(httpx.URL(server.url).copy_with(userinfo=b"")).rstrip("/")
        browser.get(f"{bare}/incidents?status=open")
        until_shown(browser, "h1", "Sign in")
        assert serious(browser) == []
        browser.find_element(By.ID, "token").send_keys("wrong", Keys.ENTER)
        until_shown(browser, "[role=alert]", "That is not the token")
        assert all("401" in c for c in complaints(browser))
        browser.find_element(By.ID, "token").send_keys("s3cret-s3cret-s3cret", Keys.ENTER)
        until_shown(browser, "h1", "Incidents")
        assert browser.current_url.endswith("/incidents?status=open")


def test_what_changes_appears_and_what_is_lost_is_said_and_heals_by_itself(
    browser: WebDriver, tmp_path: Path
) -> None:
    with serving(tmp_path) as server:
        made = simulated.Job(url=server.url, ranks=300, groups=simulated.whole(300))
        with made.beating():
            browser.get(f"{server.url}/ranks?sort=-step")
            until_shown(browser, "#verdict h1", "All is well")
            browser.find_element(By.ID, "q").send_keys("node1")
            until_shown(browser, "#table", "node10")
            browser.execute_script(
                "window.scrollTo(0, 200); window.kept = document.querySelector('#q')"
            )
            place = "return window.kept.getBoundingClientRect().top"
            same = "return [window.kept === document.activeElement, window.kept.value]"
            before = browser.execute_script(place)
            made.hang(7)
            until_shown(browser, "#verdict h1", "rank 7 has not entered")
            assert (
                abs(browser.execute_script(place) - before) < 3
            )  # although there is more above it now
            assert browser.execute_script(same) == [True, "node1"]
            server.stop()
            until_shown(browser, "#connection", "No connection to the server: what you see is")
            assert "rank 7 has not entered" in text(browser, "#verdict")
            server.start()
            assert eventually(lambda: text(browser, "#connection") == "", PATIENCE_S)
            until_shown(browser, "#verdict h1", "rank 7 has not entered")
            assert browser.execute_script(same) == [True, "node1"]
            made.late = set()
            until_shown(browser, "#verdict h1", "All is well")
        until_shown(browser, "#verdict", "Unknown: no node agent of this job has reported", 40)


def test_what_a_job_says_is_text_and_nothing_else(browser: WebDriver, tmp_path: Path) -> None:
    def evil(where: str) -> str:
        script = f"window.pwned='{where}'"
        return f'</script></title><img src=x onerror="{script}"><script>{script}</script>{{{{7*7}}}}\'"&lt;b&gt;'

    with serving(tmp_path, stall_after=2) as server:
        made = simulated.Job(
            url=server.url,
            ranks=4,
            groups=lambda _: [
                simulated.Group(name=evil("group"), desc=evil("description"), ranks="0-3")
            ],
            name=evil("job"),
            host=evil("host").replace("{", "{{").replace("}", "}}") + "{}",
            op=evil("op"),
            phase=evil("phase"),
            place=Frame(
                function=evil("function"), file=f"/u/{evil('file')}.py", line=3, text=evil("text")
            ),
            raised=ExceptionInfo(type=evil("type"), message=evil("message")),
        )
        with made.beating():
            browser.get(f"{server.url}/ranks")
            until_shown(browser, "#verdict", "All is well")
            raised, made.raised = made.raised, None
            made.hang(2)
            until_shown(browser, "#verdict .place", "window.pwned='function'")
            [incident] = server.items("incidents")
            pages = [
                "/ranks",
                "/ranks?view=groups",
                f"/ranks?by={httpx.QueryParams(by=evil('description'))['by']}",
                "/incidents",
            ]
            pages.append(f"/incidents/{incident['id']}")
            _harmless(browser, server.url, pages)
            made.raised = raised
            assert eventually(
                lambda: any(i["kind"] == "dead_rank" for i in server.items("incidents")), PATIENCE_S
            )
            _harmless(
                browser,
                server.url,
                ["/ranks", *(f"/incidents/{i['id']}" for i in server.items("incidents"))],
            )
            click(browser, "[data-up]")
        picture = server.get_text(f"incidents/{incident['id']}/stacks.svg")
        assert "<script" not in picture
        assert "<img" not in picture
        assert json.loads(server.get_text(f"incidents/{incident['id']}/stacks.speedscope.json"))[
            "profiles"
        ]


def _harmless(browser: WebDriver, url: str, pages: list[str]) -> None:
    for at in pages:
        browser.get(url + at)
        until_shown(browser, "main", "window.pwned='job'")
        browser.execute_async_script("setTimeout(arguments[0], 1200)")  # parts come again as events
        assert browser.execute_script("return window.pwned") is None, at
        assert (
            browser.execute_script("return document.querySelectorAll('img, main script').length")
            == 0
        ), at
        assert "{{7*7}}" in text(browser, "main"), at
    assert complaints(browser) == []


def test_a_phone_shows_all_of_it_without_scrolling_sideways(
    browser: WebDriver, tmp_path: Path
) -> None:
    with serving(tmp_path, stall_after=2) as server:
        made = simulated.Job(
            url=server.url,
            ranks=64,
            groups=simulated.whole(64),
            host="a-host-with-a-rather-long-name-{}.cluster.example",
        )
        made.hang(5)
        with made.beating():
            browser.set_window_size(390, 844)
            try:
                browser.get(f"{server.url}/ranks")
                until_shown(browser, "#verdict .place", "load_batch")
                [incident] = server.items("incidents")
                for at in (
                    "/ranks",
                    "/ranks?view=groups",
                    "/incidents",
                    f"/incidents/{incident['id']}",
                ):
                    browser.get(server.url + at)
                    until_shown(browser, "main", "rank 5 has not entered")
                    assert browser.execute_script(
                        "return document.documentElement.scrollWidth <= innerWidth"
                    ), at
            finally:
                browser.set_window_size(1280, 900)
