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
    sa.Column("body", sa.Text, nullable=False),  # as the API shows it
    sa.Column("memory", sa.Text, nullable=False),  # what only the server needs of it
    sa.Column("server", sa.String, nullable=False, server_default=""),  # whose it is
    sa.Column("revision", sa.Integer, nullable=False, server_default="0"),  # counts its writes
    sa.Column(
        "size", sa.Integer, nullable=False, server_default="0"
    ),  # characters of body and memory
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

# Messages that a channel has yet to take. A row is written before the first try and deleted after
# the last one.
DELIVERIES = sa.Table(
    "deliveries",
    METADATA,
    sa.Column("incident", sa.String(26), primary_key=True),
    sa.Column("event", sa.String, primary_key=True),
    sa.Column("channel", sa.String(16), primary_key=True),
    sa.Column("server", sa.String, nullable=False),
)
