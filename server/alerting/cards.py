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
_LINK_LABEL = "Open the incident"
_ICONS = {"resolved": "✅", "test": "🧪"}


def build_slack_message(message: AlertMessage) -> dict[str, Any]:
    """``text`` is what notifications show."""
    label, _, sentence = message.title.partition(" job ")
    header = _make_plain_text(f"{_ICONS.get(message.event, '🛑')} {label}", _MAX_HEADER)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": header},
        {"type": "section", "text": _make_plain_text(f"job {sentence}", _MAX_SECTION)},
    ]
    fields = [_make_plain_text(f"{name}: {v}", _MAX_FIELD) for name, v in _iter_facts(message)]
    if fields:
        blocks.append({"type": "section", "fields": fields})
    if message.advice:
        blocks.append({"type": "section", "text": _make_plain_text(message.advice, _MAX_SECTION)})
    button = {"type": "button", "text": _make_plain_text(_LINK_LABEL, 75), "url": message.url}
    blocks.append({"type": "actions", "elements": [button]})
    text = message.title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": truncate_end(text, _MAX_SECTION), "blocks": blocks}


def _make_plain_text(text: str, limit: int) -> dict[str, Any]:
    return {"type": "plain_text", "text": truncate_end(text, limit) or "-", "emoji": False}


def build_teams_message(message: AlertMessage) -> dict[str, Any]:
    """For an incoming webhook, or a workflow that posts what it receives."""
    colour = _COLOURS.get(message.event, "Attention")
    body: list[dict[str, Any]] = [
        _make_text_block(message.title, weight="Bolder", size="Medium", color=colour)
    ]
    facts = [{"title": name, "value": _escape(value)} for name, value in _iter_facts(message)]
    if facts:
        body.append({"type": "FactSet", "facts": facts})
    if message.advice:
        body.append(_make_text_block(message.advice))
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": body,
        "actions": [{"type": "Action.OpenUrl", "title": _LINK_LABEL, "url": message.url}],
    }
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
