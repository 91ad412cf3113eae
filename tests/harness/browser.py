"""A headless Chromium for one test."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

AXE_SCRIPT = Path(__file__).parent.parent / "vendor" / "axe-core" / "axe.min.js"
BROWSER_TIMEOUT_S = 30.0  # on a busy machine


class BrowserError(Exception):
    """Chromium or its driver is not installed; the message says what to install."""


@contextlib.contextmanager
def open_browser(profile: Path, *, width: int = 1280, height: int = 900) -> Iterator[WebDriver]:
    """Runs a browser during the block, with its own profile folder. Raises BrowserError."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        raise BrowserError(
            "needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver)"
        )
    options = Options()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        "--hide-scrollbars",
    ):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    try:
        made.set_script_timeout(BROWSER_TIMEOUT_S)
        yield made
    finally:
        made.quit()


def list_accessibility_violations(browser: WebDriver) -> list[str]:
    """Violations of serious or critical impact that axe-core finds in each theme, and requests to
    other hosts.
    """
    foreign_requests = (
        "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) =>"
        " !n.startsWith(location.origin))"
    )
    violations = [
        f"{browser.current_url} requests {other}"
        for other in browser.execute_script(foreign_requests)
    ]
    browser.execute_script(AXE_SCRIPT.read_text())
    for theme in ("light", "dark"):
        browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        result = browser.execute_async_script(
            "axe.run().then(arguments[0], (error) => arguments[0]({error: String(error)}))"
        )
        assert "error" not in result, result
        for violation in result["violations"]:
            if violation["impact"] in ("serious", "critical"):
                nodes = "; ".join(
                    f"{n['html'][:200]} ({n['failureSummary'][:300]})"
                    for n in violation["nodes"][:3]
                )
                violations.append(f"{browser.current_url}, {theme}: {violation['id']}: {nodes}")
    return violations


def get_text(browser: WebDriver, selector: str) -> str:
    """The visible text of an element; empty if there is no such element. Read in one step, since a
    live page changes between two.

    On a busy machine Chromium's driver may report a page as loaded while it is still empty (3 of 100
    times): call `wait_until_shown` first after ``browser.get``.
    """
    text: str = browser.execute_script(
        "return document.querySelector(arguments[0])?.innerText ?? ''", selector
    )
    return text


def wait_until_shown(
    browser: WebDriver, selector: str, wanted: str, timeout_s: float = BROWSER_TIMEOUT_S
) -> str:
    """Waits until an element shows a text, and returns its whole text. Raises AssertionError with
    what it shows instead.
    """
    with contextlib.suppress(Exception):
        WebDriverWait(browser, timeout_s, 0.1).until(lambda b: wanted in get_text(b, selector))
    shown = get_text(browser, selector)
    assert wanted in shown, f"{selector} shows {shown[:2000]!r}, not {wanted!r}"
    return shown


def click_element(browser: WebDriver, selector: str) -> None:
    browser.find_element(By.CSS_SELECTOR, selector).click()


def list_console_errors(browser: WebDriver) -> list[str]:
    """Script errors and violations of the Content-Security-Policy since the last call. HTTP errors
    are not included.
    """
    entries: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[attr-defined] # Chromium's own
    return [e["message"] for e in entries if e["level"] == "SEVERE" and e["source"] != "network"]
