"""Alerts as messages of Slack (Block Kit) and Teams (Adaptive Cards): the verdict, culprit, line and a
link. Pure. What the job wrote is plain text in them, so that it cannot mention people or make links.

https://docs.slack.dev/reference/block-kit, https://adaptivecards.io/explorer
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hangwatch.report.sites import format_site
from hangwatch.report.text import name_ranks, truncate_end

from .message import AlertMessage

# Slack's limits, in characters.
_MAX_HEADER, _MAX_SECTION, _MAX_FIELD = 150, 2900, 300
_ADAPTIVE_CARD = "application/vnd.microsoft.card.adaptive"
_COLOURS = {"resolved": "Good", "test": "Accent"}  # of the title in Teams; otherwise Attention
_ICONS = {"resolved": "✅", "test": "🧪"}


def build_slack_message(message: AlertMessage) -> dict[str, Any]:
    """``text`` is what notifications show."""
    icon = _ICONS.get(message.event, "🛑")
    label, _, sentence = message.title.partition(" job ")
    blocks: list[dict[str, Any]] = [
        {
            "type": "header",
            "text": _make_plain_text(f"{icon} {label or message.title}", _MAX_HEADER),
        },
        {
            "type": "section",
            "text": _make_plain_text(
                f"job {sentence}" if sentence else message.title, _MAX_SECTION
            ),
        },
    ]
    facts = list(_iter_facts(message))
    if facts:
        fields = [_make_plain_text(f"{name}: {value}", _MAX_FIELD) for name, value in facts]
        blocks.append({"type": "section", "fields": fields})
    advice = _get_advice(message)
    if advice:
        blocks.append({"type": "section", "text": _make_plain_text(advice, _MAX_SECTION)})
    if message.url:
        button = {
            "type": "button",
            "text": _make_plain_text("Open the incident", 75),
            "url": message.url,
        }
        blocks.append({"type": "actions", "elements": [button]})
    text = message.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": truncate_end(text, _MAX_SECTION), "blocks": blocks}


def _make_plain_text(text: str, limit: int) -> dict[str, Any]:
    return {"type": "plain_text", "text": truncate_end(text, limit) or "-", "emoji": False}


def build_teams_message(message: AlertMessage) -> dict[str, Any]:
    """For an incoming webhook, or a workflow that posts what it receives."""
    body: list[dict[str, Any]] = [
        _make_text_block(
            message.title,
            weight="Bolder",
            size="Medium",
            color=_COLOURS.get(message.event, "Attention"),
        )
    ]
    facts = [{"title": name, "value": _escape(value)} for name, value in _iter_facts(message)]
    if facts:
        body.append({"type": "FactSet", "facts": facts})
    advice = _get_advice(message)
    if advice:
        body.append(_make_text_block(advice))
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": body,
    }
    if message.url:
        card["actions"] = [
            {"type": "Action.OpenUrl", "title": "Open the incident", "url": message.url}
        ]
    attachment = {"contentType": _ADAPTIVE_CARD, "contentUrl": None, "content": card}
    return {"type": "message", "attachments": [attachment]}


def _make_text_block(text: str, **style: str) -> dict[str, Any]:
    return {"type": "TextBlock", "text": _escape(text), "wrap": True, **style}


def _escape(text: str) -> str:
    """Teams renders a part of Markdown in cards, including links."""
    return "".join(f"\\{c}" if c in "\\`*_[]()#<>" else c for c in text)


def _iter_facts(message: AlertMessage) -> Iterator[tuple[str, str]]:
    body = message.body
    if body.get("culprits"):
        yield "Culprit", truncate_end(name_ranks(body["culprits"]), _MAX_FIELD - 20)
    if body.get("waiting"):
        count = len(body["waiting"])
        yield "Waiting", f"{count} rank{'' if count == 1 else 's'}"
    if body.get("site"):
        yield "Line", format_site(body["site"])
    if body.get("kind"):
        yield "Kind", str(body["kind"])


def _get_advice(message: AlertMessage) -> str:
    """The message's text without the link, which the card has as a button."""
    lines = [line for line in message.text.splitlines() if line != message.url]
    return "\n".join(lines)
