"""Who may use the API: tokens, cookies, pages of other sites, and the limit of failures."""

from __future__ import annotations

import base64
import os

from starlette.datastructures import Headers

from hangwatch.protocol.heartbeat import HEARTBEAT_PATH
from hangwatch.protocol.request_signing import Credential, derive_job_token
from hangwatch.server.http import access
from hangwatch.server.http.access import (
    COOKIE_NAME,
    PEER_UID,
    derive_session_value,
    has_token,
)


def test_every_token_form_is_accepted() -> None:
    def encode_basic(text: str) -> str:
        return "Basic " + base64.b64encode(text.encode()).decode()

    for good in (
        "Bearer s3cret",
        "bearer  s3cret",
        encode_basic(":s3cret"),
        encode_basic("any:s3cret"),
    ):
        assert has_token(Headers({"authorization": good}), "s3cret"), good
    for bad in (
        "",
        "Bearer",
        "Bearer s3cre",
        encode_basic(":other"),
        "Basic ~~~",
        encode_basic("s3cret"),
        "Digest s3cret",
        "Bearer é",
    ):
        assert not has_token(Headers({"authorization": bad}), "s3cret"), bad
    authenticator = access.Authenticator("s3cret", "own", None)
    scope = {"method": "GET", "path": "/ranks"}
    good_cookie = f"a=b; {COOKIE_NAME}={derive_session_value('s3cret')}"
    assert authenticator.check_request(scope, Headers({"cookie": good_cookie})) is None
    assert authenticator.check_request(scope, Headers({"cookie": f"{COOKIE_NAME}=s3cret"}))


def test_cross_site_request_is_refused() -> None:
    def is_cross_site(
        by_cookie: bool = False, known: str | None = None, method: str = "POST", **headers: str
    ) -> bool:
        http_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return access.is_cross_site(
            method, Headers({"host": "h:1", **http_headers}), known, by_cookie=by_cookie
        )

    assert not is_cross_site()
    assert is_cross_site(by_cookie=True)
    for site, expected in (
        ("same-origin", False),
        ("none", False),
        ("same-site", True),
        ("cross-site", True),
    ):
        assert is_cross_site(sec_fetch_site=site) is expected
    assert is_cross_site(origin="http://evil.example")
    assert is_cross_site(origin="null")
    assert is_cross_site(origin="http://[")
    assert not is_cross_site(origin="http://h:1", by_cookie=True)
    assert not is_cross_site(
        origin="https://watch.example", known="https://watch.example/x", by_cookie=True
    )
    assert not is_cross_site(sec_fetch_site="cross-site", method="GET")


def test_only_loopback_names_are_local() -> None:
    for good in (
        "localhost",
        "localhost:8642",
        "127.0.0.1:8642",
        "[::1]:8642",
        "127.1.2.3",
        "a.localhost:1",
        "own",
    ):
        assert access.is_local_name(good, "own"), good
    for bad in (
        None,
        "",
        "evil.example",
        "10.0.0.1:8642",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::2]",
        "[::1",
    ):
        assert not access.is_local_name(bad, "own"), bad


def test_wrong_tokens_are_throttled() -> None:
    failures = access.LoginFailures()
    for number in range(access.MAX_FAILURES):
        assert failures.wait_s("a", number) == 0
        failures.add_failure("a", number)
    assert failures.wait_s("a", 10.0) == access.FAILURE_WINDOW_S - 10
    assert failures.wait_s("b", 10.0) == 0
    assert failures.wait_s("a", access.FAILURE_WINDOW_S) == 0


def test_credential_decides_whose_reports_they_are() -> None:
    """SECURITY.md: "a job's token, the server's token or, on a server without one, the user"."""
    scope = {"method": "POST", "path": HEARTBEAT_PATH}
    without_token = access.Authenticator(None, "own", None)
    for uid in {0, os.geteuid()}:
        own_user = {**scope, PEER_UID: uid}
        grant = without_token.check_agent(own_user, {"host": "localhost"}, HEARTBEAT_PATH)
        assert (grant.tenant, grant.job) == (f"uid {uid}", None)
    with_token = access.Authenticator("s3cret", "own", None)
    for token, tenant in (("s3cret", ""), (derive_job_token("s3cret", "run7"), "run7")):
        credential = Credential.from_token(token)
        signed = credential.sign_request("POST", HEARTBEAT_PATH, b"{}", with_token._get_time())
        grant = with_token.check_agent(scope, {"authorization": signed.header}, HEARTBEAT_PATH)
        assert grant.tenant == tenant
    own_user = {**scope, PEER_UID: 0}
    grant = with_token.check_agent(own_user, {"authorization": "Bearer s3cret"}, HEARTBEAT_PATH)
    assert grant.tenant == ""
