"""The tables, as the newest migration leaves them."""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()

INCIDENTS = sa.Table(
    "incidents",
    METADATA,
    sa.Column("id", sa.String(26), primary_key=True),
    sa.Column("job", sa.String, nullable=False, index=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("opened_at", sa.String, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # the document that the API returns
    sa.Column("memory", sa.Text, nullable=False),  # state that only the server uses
    sa.Column("server", sa.String, nullable=False, server_default=""),  # the server that owns it
    sa.Column("revision", sa.Integer, nullable=False, server_default="0"),  # the number of updates
    # Characters of body and memory:
    sa.Column("size", sa.Integer, nullable=False, server_default="0"),
)

ATTEMPTS = sa.Table(
    "attempts",
    METADATA,
    sa.Column("server", sa.String, primary_key=True),
    sa.Column("job", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("restart", sa.Integer, nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("hosts", sa.Text, nullable=False),  # a JSON list
    sa.Column("state", sa.String, nullable=False),
    sa.Column("opened_at", sa.String, nullable=False),
    sa.Column("heard_at", sa.String, nullable=False),
)

# Messages that a channel has not accepted yet. A row is written before the first attempt to send
# it and deleted after the last one.
DELIVERIES = sa.Table(
    "deliveries",
    METADATA,
    sa.Column("incident", sa.String(26), primary_key=True),
    sa.Column("event", sa.String, primary_key=True),
    sa.Column("channel", sa.String(16), primary_key=True),
    sa.Column("server", sa.String, nullable=False),
)
