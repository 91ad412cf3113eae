"""Sends alerts: a line on stderr, and a message to each channel. A slow channel delays neither the
server nor another channel.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

import tenacity

from hangwatch.model.incidents import Incident
from hangwatch.model.kind_spec import Severity
from hangwatch.report import recovery as recovery_text
from hangwatch.report.text import clean_text

from .events import RESOLVED
from .message import AlertMessage, Channel, ChannelError, Delivery
from .messages import compose_message

# The delay between two attempts to send a message doubles, with jitter.
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 60.0
RETRY_LIMIT_S = 3600.0  # after which a message is given up
MAX_QUEUED_MESSAGES = 500  # for one channel
CLOSE_TIMEOUT_S = 1.0  # for messages that are being sent when the server stops


@dataclass(slots=True, kw_only=True)
class ChannelQueue:
    """One channel's messages, and the thread that sends them once there is one."""

    channel: Channel
    sent: int = 0
    failed: int = 0
    messages: queue.SimpleQueue[tuple[AlertMessage, Delivery] | None] = field(
        default_factory=queue.SimpleQueue
    )
    thread: threading.Thread | None = None


class Alerter:
    """Prints alerts on stderr and sends them to all channels, each in a thread of its own and in
    order. Those threads call ``delivered`` once a channel accepted a message, or never will.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        base_url: str,
        delivered: Callable[[Delivery], None],
        *,
        out: TextIO | None = None,
        first_retry_delay_s: float = FIRST_RETRY_DELAY_S,
        retry_limit_s: float = RETRY_LIMIT_S,
    ) -> None:
        self._base_url, self._delivered, self._out = base_url, delivered, out
        self._first_retry_delay_s, self._retry_limit_s = first_retry_delay_s, retry_limit_s
        self._stopping = threading.Event()
        self._queues = {channel.key: ChannelQueue(channel=channel) for channel in channels}

    @property
    def queues(self) -> Collection[ChannelQueue]:
        return self._queues.values()

    def list_deliveries(self, incident: Incident, event: str) -> list[Delivery]:
        """One delivery for each channel. Warnings are only printed."""
        if incident.severity is not Severity.ALERT:
            return []
        return [Delivery(incident=incident.id, event=event, channel=key) for key in self._queues]

    def announce(self, incident: Incident, event: str, now: datetime) -> None:
        """Prints the alert and sends it to all channels."""
        message = self._compose_message(incident, event, now)
        recovery = recovery_text.format_recovery(message.body) if event != RESOLVED else ""
        self.print_line(" ".join(filter(None, (message.title, recovery, message.url))))
        for delivery in self.list_deliveries(incident, event):
            self._queue_message(self._queues[delivery.channel], message, delivery)

    def resume_delivery(self, incident: Incident, delivery: Delivery, now: datetime) -> bool:
        """Sends what an earlier server could not deliver. False if the channel no longer exists."""
        waiting = self._queues.get(delivery.channel)
        if waiting is not None:
            message = self._compose_message(incident, delivery.event, now)
            self._queue_message(waiting, message, delivery)
        return waiting is not None

    def close(self) -> None:
        """Waits shortly for messages that are being sent. The others stay undelivered."""
        self._stopping.set()
        for waiting in self._queues.values():
            waiting.messages.put(None)
        for waiting in self._queues.values():
            if waiting.thread is not None:
                waiting.thread.join(CLOSE_TIMEOUT_S)

    def print_line(self, line: str) -> None:
        """``line`` may quote a job, which must not control the operator's terminal."""
        print(f"hangwatch: {clean_text(line)}", file=self._out or sys.stderr, flush=True)

    def _compose_message(self, incident: Incident, event: str, now: datetime) -> AlertMessage:
        return compose_message(incident, event, f"{self._base_url}/incidents/{incident.id}", now)

    def _queue_message(
        self, waiting: ChannelQueue, message: AlertMessage, delivery: Delivery
    ) -> None:
        name = waiting.channel.name
        if waiting.messages.qsize() >= MAX_QUEUED_MESSAGES:
            waiting.failed += 1
            self.print_line(
                f"alert channel {name} is behind by {MAX_QUEUED_MESSAGES} messages:"
                f" {message.title!r} was not sent there"
            )
            self._delivered(delivery)
            return
        waiting.messages.put((message, delivery))
        if waiting.thread is None:
            # A daemon: a channel that never answers must not keep the server from ending.
            waiting.thread = threading.Thread(
                target=self._send_messages, args=(waiting,), name=f"alerts to {name}", daemon=True
            )
            waiting.thread.start()

    def _send_messages(self, waiting: ChannelQueue) -> None:
        while (queued := waiting.messages.get()) is not None and not self._stopping.is_set():
            message, delivery = queued
            try:
                self._send_with_retries(waiting.channel, message)
            except Exception as error:  # of any library; the other messages are still to be sent
                if self._stopping.is_set():
                    return
                waiting.failed += 1
                self.print_line(
                    f"alert channel {waiting.channel.name} did not accept {message.title!r}"
                    f" ({error}): check --alert, try --test-alert"
                )
            else:
                waiting.sent += 1
            try:
                self._delivered(delivery)
            except Exception as error:  # the thread goes on with the other messages
                self.print_line(f"cannot record that {message.title!r} was sent: {error}")

    def _send_with_retries(self, channel: Channel, message: AlertMessage) -> None:
        def report_first_failure(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                self.print_line(
                    f"alert channel {channel.name} failed ({state.outcome.exception()}); it is"
                    " tried again"
                )

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(
                lambda error: not (isinstance(error, ChannelError) and error.final)
            ),
            wait=tenacity.wait_exponential(self._first_retry_delay_s, MAX_RETRY_DELAY_S)
            + tenacity.wait_random(0, self._first_retry_delay_s),
            stop=tenacity.stop_after_delay(self._retry_limit_s)
            | tenacity.stop_when_event_set(self._stopping),
            sleep=tenacity.sleep_using_event(self._stopping),
            before_sleep=report_first_failure,
            reraise=True,
        )
        tries(channel.send_message, message)


def send_test_messages(channels: Sequence[Channel], base_url: str) -> list[tuple[str, str | None]]:
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
    results: list[tuple[str, str | None]] = []
    for channel in channels:
        try:
            channel.send_message(message)
        except Exception as error:  # whatever a library raises
            results.append((channel.name, str(error) or type(error).__name__))
        else:
            results.append((channel.name, None))
    return results
