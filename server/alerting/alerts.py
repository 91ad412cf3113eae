"""Telling people: a line on stderr, and a message to each channel, none of which can hold up the
server or another channel.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

import tenacity

from hangwatch.model.incidents import Incident, Resolution
from hangwatch.model.kinds import Severity
from hangwatch.report import recovery as recovery_text
from hangwatch.report.documents import build_incident_document
from hangwatch.report.text import format_coarse_age, name_ranks, truncate_end

from ..incidents.records import IncidentRecord
from ..storage.store import Delivery
from .channels import AlertMessage, Channel, ChannelError

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds between two tries: doubles, with jitter
PATIENCE = 3600.0  # seconds after which a message is given up
WAITING_MOST = 500  # messages for one channel
LAST_MOMENT = 1.0  # seconds that messages on their way get when the server stops

OPENED, REMINDER, RESOLVED = "opened", "reminder", "resolved"
PLANNED = "planned"  # ranks may be ended for it, which was not known when it opened
ABORTING, ABORTED = "aborting", "aborted"  # before ranks are ended, and afterwards


def due(
    case: IncidentRecord, *, ready: bool, hangs_on: bool, now: datetime, repeat_after: float
) -> str | None:
    """What people should be told of an incident now, if anything; the case then counts as told.

    ``ready``: its evidence is in. ``hangs_on``: its job is still there. ``repeat_after`` in
    seconds, 0 for never.
    """
    incident = case.incident
    if not case.own:
        return None
    if case.open and case.alerted not in (Severity.ALERT, incident.severity):
        if not ready:
            return None
        case.alerted, case.told_at = incident.severity, now
        return OPENED
    if case.alerted is not Severity.ALERT:
        return None
    if not case.open:
        event = None if case.closed else RESOLVED
        case.closed = True
        return event
    if (
        not hangs_on
        or not repeat_after
        or (case.told_at is not None and (now - case.told_at).total_seconds() < repeat_after)
    ):
        return None
    case.told_at, case.reminders = now, case.reminders + 1
    return f"{REMINDER}-{case.reminders}"


def sentence(incident: Incident) -> str:
    """``job run7: SUMMARY [train.py:41 in step]``"""
    site = incident.site
    where = f" [{site.file.rsplit('/', 1)[-1]}:{site.line} in {site.function}]" if site else ""
    return (
        f"job {incident.job}:"
        f" {incident.summary}{'' if where.strip(' []') in incident.summary else where}"
    )


def compose(incident: Incident, event: str, url: str, now: datetime) -> AlertMessage:
    """The verdict in one sentence, the culprit's line, the link. ``body`` is the incident for
    programs.
    """
    kind, age = (
        event.partition("-")[0],
        format_coarse_age(((incident.resolved_at or now) - incident.opened_at).total_seconds()),
    )
    over = {Resolution.ENDED: "ENDED WITH ITS JOB", Resolution.ABORTED: "ENDED BY HANGWATCH"}
    ranks = truncate_end(name_ranks(incident.recovery.ranks if incident.recovery else []), 60)
    told = {
        OPENED: incident.severity.value.upper(),
        REMINDER: f"STILL OPEN after {age}:",
        RESOLVED: (
            f"{over.get(incident.resolution, 'RESOLVED') if incident.resolution else 'RESOLVED'}"
            f" after {age}:"
        ),
        PLANNED: f"ABORT PLANNED of {ranks}:",
        ABORTING: f"ABORTING {ranks}:",
        ABORTED: f"ABORTED {ranks}:",
    }
    body = {**build_incident_document(incident), "url": url}
    advice = incident.advice if kind == OPENED else ""
    text = "\n".join(
        line
        for line in (advice, recovery_text.format_recovery(body) if kind != RESOLVED else "", url)
        if line
    )
    return AlertMessage(
        id=f"{incident.id}.{event}",
        event=kind,
        title=f"{told[kind]} {sentence(incident)}",
        text=text,
        body=body,
    )


@dataclass(slots=True)
class Counts:
    sent: int = 0
    failed: int = 0


class Alerter:
    """Sends messages, each channel in a thread of its own, in order. ``delivered`` is called from
    those threads.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        url_of: Callable[[str], str],
        delivered: Callable[[Delivery], None],
        *,
        out: TextIO | None = None,
        first_wait: float = FIRST_WAIT,
        patience: float = PATIENCE,
    ) -> None:
        self._url_of, self._out = url_of, out
        self._queues = {
            channel.key: _Queue(
                channel=channel,
                delivered=delivered,
                say=self.say,
                first_wait=first_wait,
                patience=patience,
            )
            for channel in channels
        }

    @property
    def counts(self) -> dict[str, Counts]:
        """By channel, under its name."""
        return {waiting.channel.name: waiting.counts for waiting in self._queues.values()}

    def deliveries(self, incident: Incident, event: str) -> list[Delivery]:
        """The messages that this calls for: warnings stay on stderr."""
        if incident.severity is not Severity.ALERT:
            return []
        return [Delivery(incident=incident.id, event=event, channel=key) for key in self._queues]

    def announce(self, incident: Incident, event: str, now: datetime) -> None:
        """Says it on stderr and sends its `deliveries`."""
        url = self._url_of(incident.id)
        message = compose(incident, event, url, now)
        recovery = recovery_text.format_recovery(message.body) if event != RESOLVED else ""
        self.say(f"{message.title} {recovery} {url}" if recovery else f"{message.title} {url}")
        for delivery in self.deliveries(incident, event):
            self._queues[delivery.channel].put(message, delivery)

    def resume(self, incident: Incident, delivery: Delivery, now: datetime) -> bool:
        """Sends what a former server could not. False where its channel is gone."""
        waiting = self._queues.get(delivery.channel)
        if waiting is not None:
            waiting.put(compose(incident, delivery.event, self._url_of(incident.id), now), delivery)
        return waiting is not None

    def close(self) -> None:
        """Gives what is on its way a moment more; the rest stays undelivered."""
        for waiting in self._queues.values():
            waiting.stop()
        for waiting in self._queues.values():
            waiting.join(LAST_MOMENT)

    def say(self, line: str) -> None:
        print(f"hangwatch: {line}", file=self._out or sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class _Queue:
    """One channel's messages, and the thread that sends them."""

    channel: Channel
    delivered: Callable[[Delivery], None]
    say: Callable[[str], None]
    first_wait: float
    patience: float
    counts: Counts = field(default_factory=Counts)
    _waiting: queue.Queue[tuple[AlertMessage, Delivery] | None] = field(
        default_factory=lambda: queue.Queue(WAITING_MOST)
    )
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def put(self, message: AlertMessage, delivery: Delivery) -> None:
        if self._thread is None:
            # A daemon: a channel that never answers must not keep the server from ending.
            self._thread = threading.Thread(
                target=self._work, name=f"alerts to {self.channel.name}", daemon=True
            )
            self._thread.start()
        try:
            self._waiting.put_nowait((message, delivery))
        except queue.Full:
            self.counts.failed += 1
            self.say(
                f"alert channel {self.channel.name} is behind by {WAITING_MOST} messages:"
                f" {message.title!r} was not sent there"
            )
            self.delivered(delivery)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None and self._waiting.empty():
            self._waiting.put(None)

    def join(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _work(self) -> None:
        while (given := self._waiting.get()) is not None and not self._stopping.is_set():
            self._deliver(*given)

    def _deliver(self, message: AlertMessage, delivery: Delivery) -> None:
        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(
                lambda error: not (isinstance(error, ChannelError) and error.final)
            ),
            wait=tenacity.wait_exponential(self.first_wait, LONGEST_WAIT)
            + tenacity.wait_random(0, self.first_wait),
            stop=tenacity.stop_after_delay(self.patience)
            | tenacity.stop_when_event_set(self._stopping),
            sleep=tenacity.sleep_using_event(self._stopping),
            before_sleep=lambda state: self._complain(state, message),
            reraise=True,
        )
        try:
            tries(self.channel.send_message, message)
        except (
            Exception
        ) as error:  # whatever a library raises, the other messages are still to be sent
            if self._stopping.is_set():
                return
            self.counts.failed += 1
            self.say(
                f"alert channel {self.channel.name} did not take {message.title!r} ({error}): check"
                " --alert, try --test-alert"
            )
        else:
            self.counts.sent += 1
        self.delivered(delivery)

    def _complain(self, state: tenacity.RetryCallState, message: AlertMessage) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            self.say(
                f"alert channel {self.channel.name} failed ({state.outcome.exception()}); it is"
                " tried again"
            )


def test(channels: Sequence[Channel], base_url: str) -> list[tuple[str, str | None]]:
    """Sends each channel a message, once. Its name, and why it failed if it did."""
    url = f"{base_url}/incidents"
    title = (
        "TEST job example: rank 3 has not entered all_reduce, for which 7 ranks wait [train.py:41"
        " in step]"
    )
    text = f"This is a test of hangwatch's alerts; nothing hangs.\n{url}"
    found: list[tuple[str, str | None]] = []
    for channel in channels:
        try:
            channel.send_message(
                AlertMessage(
                    id="test", event="test", title=title, text=text, body={"id": "test", "url": url}
                )
            )
        except Exception as error:  # whatever a library raises
            found.append((channel.name, str(error) or type(error).__name__))
        else:
            found.append((channel.name, None))
    return found
