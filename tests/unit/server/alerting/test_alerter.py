"""Alerts on real receivers: over HTTP, over SMTP, and a command."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller

from hangwatch.model.incidents import Incident
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.server.alerting.alerter import (
    OPENED,
    RESOLVED,
    Alerter,
    Delivery,
    compose_message,
    take_due_event,
)
from hangwatch.server.alerting.channels import (
    AlertChannel,
    AlertChannelError,
    AlertMessage,
    AppriseService,
    CommandChannel,
    SlackWebhook,
    Webhook,
    make_channel,
)
from hangwatch.server.core import limits
from hangwatch.server.incidents.registry import IncidentRecord
from tests.harness.processes import clean_environment
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.waiting import wait_until
from tests.unit.incident_documents import make_incident as build_incident

MOMENT = datetime(2026, 1, 1, tzinfo=timezone.utc)
WEBHOOK_SECRET = "whsec_" + base64.b64encode(b"sixteen bytes and more").decode()


def make_incident(**more: object) -> Incident:
    fields: dict[str, object] = {
        "id": "01J00000000000000000000000", "job": "run7", "attempt": 0, "kind": VerdictKind.MISSING_RANK, "severity": Severity.ALERT,
        "status": "open", "onset_at": MOMENT, "opened_at": MOMENT, "summary": "rank 1 has not entered all_reduce",
        "advice": "Look at its stack.", "culprits": [1], "waiting": [0], "site": {"file": "/u/train.py", "line": 41, "function": "load"},
    }  # fmt: skip
    return build_incident(**{**fields, **more})


class Mailbox:
    """A real SMTP receiver's handler."""

    def __init__(self) -> None:
        self.got: list[tuple[list[str], EmailMessage]] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.got.append(
            (envelope.rcpt_tos, message_from_bytes(envelope.content, policy=policy.default))
        )
        return "250 OK"


@pytest.fixture
def mailbox() -> Iterator[tuple[Mailbox, str]]:
    box = Mailbox()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    controller = Controller(box, hostname="127.0.0.1", port=port)
    controller.start()
    yield box, f"mailto://127.0.0.1:{port}/?from=watch@a.example&to=ops@b.example&mode=insecure"
    controller.stop()


@contextlib.contextmanager
def run_alerter(
    channels: list[AlertChannel], **more: Any
) -> Iterator[tuple[Alerter, list[Delivery], io.StringIO]]:
    done: list[Delivery] = []
    out = io.StringIO()
    alerter = Alerter(
        channels,
        "http://here",
        done.append,
        out=out,
        first_retry_delay_s=0.01,
        **more,
    )
    try:
        yield alerter, done, out
    finally:
        alerter.close()


def await_condition(condition: Callable[[], bool]) -> None:
    assert wait_until(condition, 20.0, 0.02)


def test_webhook_is_signed_and_contains_verdict_line_and_link() -> None:
    """SECURITY.md: "Webhooks are signed if `--alert-secret` is set."."""
    with (
        WebhookReceiver() as hook,
        run_alerter([make_channel(hook.url, WEBHOOK_SECRET)]) as (alerter, done, out),
    ):
        alerter.announce(make_incident(), OPENED, MOMENT)
        await_condition(lambda: len(done) == 1)
        [request] = hook.requests
        headers, message = request.headers, request.parse_json()
        assert (message["event"], message["culprits"], message["url"]) == (
            "opened",
            [1],
            "http://here/incidents/01J00000000000000000000000",
        )
        assert message["text"] == (
            "ALERT job run7: rank 1 has not entered all_reduce [train.py:41 in load]\nLook at its"
            " stack.\n" + message["url"]
        )
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + request.body
        expected = base64.b64encode(
            hmac.new(b"sixteen bytes and more", signed, hashlib.sha256).digest()
        ).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert abs(time.time() - int(headers["webhook-timestamp"])) < 60
        assert "secret-path" not in out.getvalue()
        assert out.getvalue().startswith(
            "hangwatch: ALERT job run7: rank 1 has not entered all_reduce [train.py:41 in load]"
            " http://here/"
        )


def test_failing_channel_is_retried_without_affecting_others(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    command = (
        f"{sys.executable} -c \"import sys; open({str(kept)!r}, 'a').write(sys.stdin.read() +"
        ' chr(10))"'
    )
    with (
        WebhookReceiver() as good,
        WebhookReceiver(503, 503, 204) as flaky,
        WebhookReceiver(400) as final,
    ):
        urls = [good.url, flaky.url, final.url, "http://127.0.0.1:1/secret-path"]
        channels = [*map(make_channel, urls), CommandChannel(address=command)]
        with run_alerter(channels) as (alerter, done, out):
            alerter.announce(make_incident(), OPENED, MOMENT)
            alerter.announce(make_incident(severity=Severity.WARNING), OPENED, MOMENT)
            alerter.announce(
                make_incident(status="resolved", resolved_at=MOMENT + timedelta(seconds=75)),
                RESOLVED,
                MOMENT,
            )
            await_condition(lambda: len(done) == 8)
            counts = [(c.sent, c.failed) for c in alerter.queues.values()]
        assert (good.events, flaky.events) == (
            ["opened", "resolved"],
            ["opened"] * 3 + ["resolved"],
        )
        assert len({request.headers["webhook-id"] for request in flaky.requests}) == 2, (
            "receivers can recognize a repetition"
        )
        assert len(final.requests) == 2, "what it refuses for good is not repeated"
        assert [json.loads(line)["event"] for line in kept.read_text().splitlines()] == [
            "opened",
            "resolved",
        ]
        assert counts == [(2, 0), (2, 0), (0, 2), (0, 0), (2, 0)]
        said = out.getvalue()
        assert "RESOLVED after 1 min 15 s: job run7" in said
        assert f"{good.url.rpartition('/')[0]} " not in said
        assert "http://127.0.0.1:1 failed (ConnectError" in said
        assert "secret-path" not in said
        assert "WARNING job run7" in said


def test_abandoned_alerts_are_logged_and_counted() -> None:
    with (
        WebhookReceiver(500) as hook,
        run_alerter([Webhook(address=hook.url)], retry_limit_s=2.0) as (alerter, done, out),
    ):
        alerter.announce(make_incident(), OPENED, MOMENT)
        await_condition(lambda: len(done) == 1)
        assert next(iter(alerter.queues.values())).failed == 1
        assert "did not accept 'ALERT job run7" in out.getvalue()
        assert len(hook.requests) > 1


def test_alert_in_flight_at_shutdown_stays_undelivered() -> None:
    with (
        WebhookReceiver(500) as hook,
        run_alerter([Webhook(address=hook.url)]) as (alerter, done, _),
    ):
        alerter.announce(make_incident(), OPENED, MOMENT)
        await_condition(lambda: len(hook.requests) > 0)
        alerter.close()
        assert done == []


def test_an_email_is_sent_by_its_url(mailbox: tuple[Mailbox, str]) -> None:
    box, url = mailbox
    with run_alerter([make_channel(url)]) as (alerter, done, out):
        alerter.announce(make_incident(), OPENED, MOMENT)
        await_condition(lambda: len(done) == 1)
    assert len(box.got) == 1, out.getvalue()
    [(to, mail)] = box.got
    assert to == ["ops@b.example"]
    assert (
        mail["subject"] == "ALERT job run7: rank 1 has not entered all_reduce [train.py:41 in load]"
    )
    text = mail.get_body(("plain", "html"))
    assert text is not None
    assert "http://here/incidents/01J00000000000000000000000" in text.get_content()


def test_unreachable_mail_server_is_reported() -> None:
    channel = AppriseService(address="mailto://me:hush@127.0.0.1:1/?to=a@b.example&mode=insecure")
    with pytest.raises(AlertChannelError) as raised:
        channel.send_message(compose_message(make_incident(), OPENED, "http://here", MOMENT))
    assert str(raised.value)
    assert "hush" not in channel.name + str(raised.value)


def test_command_gets_no_secrets_and_failure_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HANGWATCH_TOKEN", "hush")
    message: AlertMessage = compose_message(make_incident(), OPENED, "http://here", MOMENT)
    code = (
        "import os, sys; print(sorted(k for k in os.environ if k.startswith('HANGWATCH')),"
        " file=sys.stderr); sys.exit(3)"
    )
    with pytest.raises(
        AlertChannelError,
        match=r"status 3: \['HANGWATCH_EVENT', 'HANGWATCH_TEXT', 'HANGWATCH_TITLE'\]",
    ):
        CommandChannel(address=f'{sys.executable} -c "{code}"').send_message(message)
    with pytest.raises(AlertChannelError, match=r"longer than 0\.2 s"):
        CommandChannel(address="sleep 60", timeout_s=0.2).send_message(message)


def test_alert_command_is_run_without_a_shell(tmp_path: Path) -> None:
    """SECURITY.md: "`--alert-command` is run without a shell."."""
    mark = tmp_path / "mark"
    message = compose_message(make_incident(), OPENED, "http://here", MOMENT)
    CommandChannel(address=f"echo $(touch {mark}) ; touch {mark}").send_message(message)
    assert not mark.exists()


def test_alert_command_is_not_run_once_others_can_change_it(tmp_path: Path) -> None:
    """SECURITY.md: "which is checked again before each alert"."""
    program = tmp_path / "notify"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    message = compose_message(make_incident(), OPENED, "http://here", MOMENT)
    channel = CommandChannel(address=str(program))
    channel.send_message(message)
    program.chmod(0o722)
    with pytest.raises(AlertChannelError, match="can be written by other users"):
        channel.send_message(message)


def test_each_incident_is_announced_once_reminded_and_closed_once() -> None:
    record = IncidentRecord(incident=make_incident(severity=Severity.WARNING))
    now = MOMENT

    def send_alert(**more: Any) -> str | None:
        return take_due_event(
            record, **{"ready": True, "hangs_on": True, "now": now, "repeat_after": 3600.0, **more}
        )

    assert send_alert(ready=False) is None
    assert [send_alert(), send_alert()] == ["opened", None]
    record.incident = make_incident()
    assert [send_alert(ready=False), send_alert(), send_alert()] == [None, "opened", None]
    now += timedelta(hours=1)
    assert send_alert(repeat_after=0.0) is None
    assert send_alert(hangs_on=False) is None
    assert [send_alert(), send_alert()] == ["reminder-1", None]
    now += timedelta(hours=1)
    assert send_alert() == "reminder-2"
    record.incident = make_incident(status="resolved", resolved_at=now)
    assert [send_alert(), send_alert()] == ["resolved", None]
    record.is_own, record.is_resolution_announced = False, False
    assert send_alert() is None
    assert compose_message(make_incident(), "reminder-2", "u", now).title.startswith(
        "STILL OPEN after 2 h 0 min: job run7"
    )


def test_chat_service_url_is_not_a_plain_webhook() -> None:
    slack = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    plain, chat = make_channel("https://a.example/x"), make_channel(slack)
    assert isinstance(plain, Webhook)
    assert isinstance(chat, SlackWebhook)
    assert "TIiajkdnlazkcOXrIdevi7FQ" not in chat.name


@pytest.mark.slow
def test_test_alert_reports_each_delivery(tmp_path: Path, mailbox: tuple[Mailbox, str]) -> None:
    box, mail = mailbox
    command = [str(Path(sys.executable).with_name("hangwatch-server")), "--test-alert"]

    def run_test_alert(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more],
            env=clean_environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    with WebhookReceiver() as hook:
        done = run_test_alert(
            "--alert", hook.url, "--alert", mail, "--alert", "http://127.0.0.1:1/x"
        )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(": accepted the message")
    assert lines[1].endswith(": accepted the message")
    assert lines[2].startswith("http://127.0.0.1:1: ConnectError")
    assert (hook.events, len(box.got)) == (["test"], 1)
    assert "x" not in [path.name for path in tmp_path.iterdir()]
    none = run_test_alert()
    assert (none.returncode, "--alert" in none.stderr) == (2, True)


def test_a_channel_has_one_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with (
        WebhookReceiver() as hook,
        run_alerter([Webhook(address=hook.url)]) as (alerter, done, _),
    ):
        for _number in range(3):
            alerter.announce(make_incident(), OPENED, MOMENT)
        await_condition(lambda: len(done) == 3)
        fresh = {thread.name for thread in threading.enumerate()} - before
        assert sum(name.startswith("alerts to ") for name in fresh) == 1


def test_alerts_of_one_job_delay_those_of_others_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUED_ALERTS", replace(limits.QUEUED_ALERTS, maximum=20))
    with (
        WebhookReceiver() as hook,
        run_alerter([Webhook(address=hook.url)]) as (alerter, done, out),
    ):
        hook.delay_s = 0.2  # the first one is being sent meanwhile
        for number in range(12):
            alerter.announce(make_incident(job=f"evil/{number}"), OPENED, MOMENT)
            await_condition(lambda: bool(hook.requests))
        alerter.announce(make_incident(job="run7"), OPENED, MOMENT)
        hook.delay_s = 0.0
        await_condition(lambda: len(done) == 13)
        jobs = [request.parse_json()["job"] for request in hook.requests]
        [queue] = alerter.queues.values()
    assert jobs.index("run7") <= 2
    assert (len(jobs), queue.failed) == (12, 1), "evil may have half of the queue"
    assert alerter.refusals == {limits.QUEUED_ALERTS.name: 1}
    assert "too many alerts of job evil/11 wait for alert channel" in out.getvalue()
