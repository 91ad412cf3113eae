"""When an alert is due, its text, and how it is sent: as a line on stderr, and as a message to
each channel. A slow channel delays neither the server nor another channel.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

import tenacity

from hangwatch.model.incidents import Incident, Resolution
from hangwatch.model.kinds import Severity
from hangwatch.protocol.heartbeat import get_family
from hangwatch.report import recovery as recovery_text
from hangwatch.report import text
from hangwatch.report.documents import build_document

from ..core import limits
from ..core.problems import Problem
from ..core.turns import TurnQueue
from ..incidents.registry import IncidentRecord
from .channels import AlertChannel, AlertChannelError, AlertMessage

OPENED, REMINDER, RESOLVED = "opened", "reminder", "resolved"
PLANNED = "planned"  # ranks may be ended, which was not known when the incident opened
ABORTING, ABORTED = "aborting", "aborted"  # ranks are about to be ended, and were ended

MAX_RANKS_LENGTH = 60  # characters in a title
_RESOLVED_TITLES: dict[Resolution | None, str] = {
    Resolution.ENDED: "ENDED WITH ITS JOB",
    Resolution.ABORTED: "ENDED BY HANGWATCH",
}
# The delay between two attempts to send a message doubles, with jitter.
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 60.0
RETRY_LIMIT_S = 3600.0  # the age at which a message is given up
CLOSE_TIMEOUT_S = 1.0  # the time for messages that are being sent when the server stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An alert that a channel has not accepted yet, as the database keeps it."""

    incident: str
    event: str
    channel: str  # the channel's key


@dataclass(slots=True, kw_only=True)
class ChannelQueue:
    """The messages that wait for one channel, and the thread that sends them once there is one."""

    channel: AlertChannel
    sent: int = 0
    failed: int = 0
    thread: threading.Thread | None = None
    _waiting: TurnQueue[tuple[AlertMessage, Delivery]] = field(default_factory=TurnQueue)
    _is_closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, family: str, message: AlertMessage, delivery: Delivery) -> None:
        """Raises Problem if the family or all together have too many."""
        with self._changed:
            count = self._waiting.count(family) + 1
            limits.QUEUED_ALERTS.check_share(count, len(self._waiting) + 1, family)
            self._waiting.put(family, (message, delivery))
            self._changed.notify()

    def take(self) -> tuple[AlertMessage, Delivery] | None:
        """Waits for the next message; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._waiting)
            return None if self._is_closed else self._waiting.take()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class Alerter:
    """Prints alerts on stderr and sends them to all channels, each in a thread of its own and in
    order. Those threads call ``delivered`` once a channel accepted a message, or never will.
    """

    def __init__(
        self,
        channels: Sequence[AlertChannel],
        base_url: str,
        delivered: Callable[[Delivery], None],
        *,
        out: TextIO | None = None,
        first_retry_delay_s: float = FIRST_RETRY_DELAY_S,
        retry_limit_s: float = RETRY_LIMIT_S,
    ) -> None:
        self._base_url = base_url
        self._delivered = delivered
        self._out = out
        self._first_retry_delay_s = first_retry_delay_s
        self._retry_limit_s = retry_limit_s
        self._stopping = threading.Event()
        self.queues = {channel.key: ChannelQueue(channel=channel) for channel in channels}
        self.refusals: Counter[str] = Counter()  # by limit

    def list_deliveries(self, incident: Incident, event: str) -> list[Delivery]:
        """One delivery for each channel. Warnings are only printed."""
        if incident.severity is not Severity.ALERT:
            return []
        return [Delivery(incident=incident.id, event=event, channel=key) for key in self.queues]

    def announce(self, incident: Incident, event: str, now: datetime) -> None:
        """Prints the alert and sends it to all channels."""
        message = compose_message(incident, event, self._base_url, now)
        recovery = recovery_text.format_recovery(message.body) if event != RESOLVED else ""
        self.print_line(" ".join(filter(None, (message.title, recovery, message.url))))
        for delivery in self.list_deliveries(incident, event):
            self._queue_message(incident.job, message, delivery)

    def resume_delivery(self, incident: Incident, delivery: Delivery, now: datetime) -> bool:
        """Sends what an earlier server could not deliver. False if the channel no longer exists."""
        if delivery.channel not in self.queues:
            return False
        message = compose_message(incident, delivery.event, self._base_url, now)
        self._queue_message(incident.job, message, delivery)
        return True

    def close(self) -> None:
        """Waits shortly for messages that are being sent. The others stay undelivered."""
        self._stopping.set()
        for waiting in self.queues.values():
            waiting.close()
        for waiting in self.queues.values():
            if waiting.thread is not None:
                waiting.thread.join(CLOSE_TIMEOUT_S)

    def print_line(self, line: str) -> None:
        """``line`` may quote a job, which must not control the operator's terminal."""
        print(f"hangwatch: {text.clean_text(line)}", file=self._out or sys.stderr, flush=True)

    def _queue_message(self, job: str, message: AlertMessage, delivery: Delivery) -> None:
        waiting = self.queues[delivery.channel]
        name = waiting.channel.name
        try:
            waiting.put(get_family(job), message, delivery)
        except Problem as problem:
            waiting.failed += 1
            self.refusals.update(problem.limits)
            self.print_line(
                f"too many alerts of job {job} wait for alert channel {name}: {message.title!r} was"
                " not sent there"
            )
            self._delivered(delivery)
            return
        if waiting.thread is None:
            # The thread is a daemon: a channel that never answers must not keep the server from
            # ending.
            waiting.thread = threading.Thread(
                target=self._send_messages, args=(waiting,), name=f"alerts to {name}", daemon=True
            )
            waiting.thread.start()

    def _send_messages(self, waiting: ChannelQueue) -> None:
        channel = waiting.channel

        def report_first_failure(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                self.print_line(
                    f"alert channel {channel.name} failed ({state.outcome.exception()}); it is"
                    " tried again"
                )

        delay = tenacity.wait_exponential(self._first_retry_delay_s, MAX_RETRY_DELAY_S)
        jitter = tenacity.wait_random(0, self._first_retry_delay_s)
        is_too_old = tenacity.stop_after_delay(self._retry_limit_s)
        is_stopping = tenacity.stop_when_event_set(self._stopping)
        send_with_retries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(
                lambda error: not (isinstance(error, AlertChannelError) and error.final)
            ),
            wait=delay + jitter,
            stop=is_too_old | is_stopping,
            sleep=tenacity.sleep_using_event(self._stopping),
            before_sleep=report_first_failure,
            reraise=True,
        )
        while (queued := waiting.take()) is not None and not self._stopping.is_set():
            message, delivery = queued
            try:
                send_with_retries(channel.send_message, message)
                waiting.sent += 1
            except Exception as error:
                # A library may raise any; other messages are still to be sent.
                if self._stopping.is_set():
                    return
                waiting.failed += 1
                self.print_line(
                    f"alert channel {channel.name} did not accept {message.title!r}"
                    f" ({error}): check --alert, try --test-alert"
                )
            try:
                self._delivered(delivery)
            except Exception as error:  # the thread continues with the other messages
                self.print_line(f"cannot record that {message.title!r} was sent: {error}")


def compose_message(incident: Incident, event: str, base_url: str, now: datetime) -> AlertMessage:
    """A message with the verdict in one sentence, the culprit's line and a link. The body is the
    incident's document. Receivers may show it unchanged, so no text in it has control characters.
    """
    kind = event.partition("-")[0]
    url = f"{base_url}/incidents/{incident.id}"
    body = text.clean_document({**build_document(incident), "url": url})
    open_for = (incident.resolved_at or now) - incident.opened_at
    age = text.format_coarse_age(open_for.total_seconds())
    ranks = text.name_ranks(incident.recovery.ranks if incident.recovery else [])
    ranks = text.truncate_end(ranks, MAX_RANKS_LENGTH)
    labels = {
        OPENED: incident.severity.value.upper(),
        REMINDER: f"STILL OPEN after {age}:",
        RESOLVED: f"{_RESOLVED_TITLES.get(incident.resolution, 'RESOLVED')} after {age}:",
        PLANNED: f"ABORT PLANNED of {ranks}:",
        ABORTING: f"ABORTING {ranks}:",
        ABORTED: f"ABORTED {ranks}:",
    }
    title = f"{labels[kind]} job {incident.job}: {incident.summary}"
    if incident.site is not None and str(incident.site) not in incident.summary:
        title = f"{title} [{incident.site}]"
    lines = [
        incident.advice if kind == OPENED else "",
        recovery_text.format_recovery(body) if kind != RESOLVED else "",
    ]
    return AlertMessage(
        id=f"{incident.id}.{event}",
        event=kind,
        title=text.clean_text(title),
        advice="\n".join(text.clean_text(line) for line in lines if line),
        body=body,
    )


def send_test_messages(
    channels: Sequence[AlertChannel], base_url: str
) -> list[tuple[str, str | None]]:
    """Sends each channel one message. Returns each channel's name, and the error if it failed."""
    title = (
        "TEST job example: rank 3 has not entered all_reduce, for which 7 ranks wait [train.py:41"
        " in step]"
    )
    message = AlertMessage(
        id="test",
        event="test",
        title=title,
        advice="This is a test of hangwatch's alerts; nothing hangs.",
        body={"id": "test", "url": f"{base_url}/incidents"},
    )
    results = []
    for channel in channels:
        problem = None
        try:
            channel.send_message(message)
        except Exception as error:  # a library may raise any
            problem = str(error) or type(error).__name__
        results.append((channel.name, problem))
    return results


def take_due_event(
    record: IncidentRecord, *, ready: bool, hangs_on: bool, now: datetime, repeat_after: float
) -> str | None:
    """The event for which an alert is due now, if any. The record then counts as alerted.

    ``ready``: the evidence is complete; ``hangs_on``: the job still exists.
    ``repeat_after`` is in seconds; 0 means that no reminder is sent.
    """
    incident = record.incident
    if not record.is_own:
        return None
    if record.is_open and record.alerted_severity not in (Severity.ALERT, incident.severity):
        if not ready:
            return None
        record.alerted_severity = incident.severity
        record.alerted_at = now
        return OPENED
    if record.alerted_severity is not Severity.ALERT:
        return None
    if not record.is_open:
        event = None if record.is_resolution_announced else RESOLVED
        record.is_resolution_announced = True
        return event
    at = record.alerted_at
    is_due = at is None or (now - at).total_seconds() >= repeat_after
    if not (hangs_on and repeat_after and is_due):
        return None
    record.alerted_at = now
    record.reminders += 1
    return f"{REMINDER}-{record.reminders}"
