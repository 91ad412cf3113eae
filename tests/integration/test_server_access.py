"""Who gets in: TLS, the login and its limit, pages of other sites, a path prefix; on a real server."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hangwatch.agent.node.reporting.uplink import HeartbeatPost, Uplink
from hangwatch.agent.transport.client import ServerTarget
from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.heartbeat import HEARTBEAT_PATH
from hangwatch.server.core.logs import MAX_PER_WINDOW
from hangwatch.server.http.access import MAX_FAILURES
from tests.harness.problems import check_problem
from tests.harness.processes import clean_environment
from tests.harness.server import COMMAND, Server, run_server

TOKEN = "more-than-sixteen-characters"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(
        [*request, *names, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True
    )
    return made, key


@pytest.fixture(scope="module")
def url(certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made, key = certificate
    flags = ["--tls-cert", str(made), "--tls-key", str(key), "--token", TOKEN]
    with run_server(tmp_path_factory.mktemp("server"), *flags) as running:
        assert running.url.startswith("https://"), "given, so it is not printed"
        assert TOKEN not in running.url_line
        yield running.url


def make_client(url: str, certificate: tuple[Path, Path]) -> httpx.Client:
    return httpx.Client(
        base_url=url,
        trust_env=False,
        timeout=20,
        verify=ssl.create_default_context(cafile=str(certificate[0])),
    )


def test_node_agent_uses_system_certificates(
    url: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = codec.encode_message(heartbeat.Heartbeat(host="n", agent="a", number=1, full=True))
    target = ServerTarget.from_url(url, TOKEN)

    def send_heartbeat() -> str:
        uplink = Uplink([target], lambda: None)
        try:
            outcome = uplink.execute_order(HeartbeatPost(beat))
            return outcome.problem if outcome.reply is None else "taken"
        finally:
            uplink.close()

    assert "CERTIFICATE_VERIFY_FAILED" in send_heartbeat()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert send_heartbeat() == "taken"


def test_browser_login_resists_cross_site_requests(
    url: str, certificate: tuple[Path, Path]
) -> None:
    """SECURITY.md: "requests from other sites are refused", "People and scripts still send the
    token itself".
    """
    ask = {"job": "none", "ranks": [0]}
    with make_client(url, certificate) as browser:
        done = browser.post("/login", data={"token": TOKEN, "next": "/ranks"})
        assert (done.status_code, done.headers["location"]) == (303, "/ranks")
        attributes = done.headers["set-cookie"].lower()
        assert all(part in attributes for part in ("httponly", "samesite=lax", "secure"))
        assert browser.get("/ranks", headers={"Accept": "text/html"}).status_code == 200
        for foreign in (
            {},
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):
            assert "another site" in check_problem(
                browser.post("/api/v1/dumps", json=ask, headers=foreign), 403
            )
        assert "unknown job" in check_problem(
            browser.post("/api/v1/dumps", json=ask, headers={"Sec-Fetch-Site": "same-origin"}), 404
        )
    with make_client(url, certificate) as script:
        check_problem(script.post("/api/v1/dumps", json=ask), 401)
        assert "unknown job" in check_problem(
            script.post("/api/v1/dumps", json=ask, headers={"Authorization": f"Bearer {TOKEN}"}),
            404,
        )


def test_token_guessing_is_throttled(url: str, certificate: tuple[Path, Path]) -> None:
    with make_client(url, certificate) as guesser:
        for number in range(MAX_FAILURES):
            assert guesser.post("/login", data={"token": f"guess {number}"}).status_code == 401
        refused = guesser.post("/login", data={"token": "another guess"})
        assert "too many wrong tokens" in check_problem(refused, 429)
        assert int(refused.headers["Retry-After"]) > 60
        accepted = guesser.post("/login", data={"token": TOKEN})
        assert accepted.status_code == 303, "others may have the same address"
        assert (
            guesser.get("/api/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code
            == 200
        )


def test_server_under_path_prefix(tmp_path: Path) -> None:
    with run_server(tmp_path, "--root-path", "/watch", "--token", TOKEN) as running:
        assert running.url.endswith("/watch")
        port = httpx.URL(running.url).port
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20
        ) as browser:
            for path in ("/watch/ranks", "/ranks"):  # whether or not the proxy takes it off
                sent = browser.get(path, headers={"Accept": "text/html"})
                assert (sent.status_code, sent.headers["location"]) == (
                    303,
                    "/watch/login?next=/ranks",
                )
            done = browser.post("/watch/login", data={"token": TOKEN, "next": "/ranks"})
            assert (done.headers["location"], "Path=/watch" in done.headers["set-cookie"]) == (
                "/watch/ranks",
                True,
            )
            assert (
                'href="/watch/incidents'
                in browser.get("/watch/ranks", headers={"Accept": "text/html"}).text
            )


def test_unusable_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("none")
    command = [
        str(COMMAND),
        "--port",
        "0",
        "--data-dir",
        str(tmp_path),
        "--tls-cert",
        str(tmp_path / "cert.pem"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=clean_environment()
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert "--tls-cert" in done.stderr
    assert "PEM" in done.stderr


@pytest.mark.parametrize("token", [None, "s" * 20])
def test_heads_that_cannot_be_parsed_fail_nothing(tmp_path: Path, token: str | None) -> None:
    """Whatever the headers of a request are, its answer is no failure, and nothing is logged."""
    fields = [
        "Host: [", "Host: localhost:99999999", "Origin: http://[", "Authorization: Basic \xe9", "Authorization: Bearer \xff",
        "Authorization: Basic /////w==", "Authorization: Hangwatch \xe9:a:b:c", "Cookie: hangwatch=\xe9; \xff=;=", "Accept: \xff",
        "Accept-Encoding: \xff", "Content-Length: -1", "Content-Encoding: \xe9", "Last-Event-ID: \xb2", "Range: bytes=\xb2-",
        "X-Forwarded-Host: [", "Referer: http://[", "Sec-Fetch-Site: \xff", "Priority: \xff",
    ]  # fmt: skip
    flags = [] if token is None else ["--token", token]
    with run_server(tmp_path, *flags) as server:
        port = httpx.URL(server.url).port or 0
        for field in fields:
            for method in ("GET", "POST"):
                for path in ("/healthz", "/login", "/ranks", HEARTBEAT_PATH, "/metrics", "/mcp"):
                    host = "" if field.startswith("Host") else "Host: localhost\r\n"
                    head = f"{method} {path} HTTP/1.1\r\n{host}{field}\r\nConnection: close\r\n\r\n"
                    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                        connection.sendall(head.encode("latin-1"))
                        status = connection.recv(4096).split(b" ")[1]
                    assert not status.startswith(b"5") or path == "/mcp", (field, method, path)
        assert "Traceback" not in server.read_log()


def test_flood_of_failures_does_not_fill_the_log(tmp_path: Path) -> None:
    """A server without a free file descriptor fails to accept connections, again and again.

    SECURITY.md: "The log is limited by kind".
    """
    server = Server(tmp_path, max_files=64)
    try:
        server.start()
        port = httpx.URL(server.url).port or 0
        with contextlib.ExitStack() as connections:
            for _ in range(100):
                connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            time.sleep(9.0)  # it tries again every second
        assert server.read_log().count("out of system resource") == MAX_PER_WINDOW
    finally:
        server.stop()
    assert re.search(r"left out \d+ more messages like those of", server.read_log())
