"""The tables of the first release."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("job", sa.String, nullable=False, index=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("opened_at", sa.String, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("is_aborted", sa.Boolean, nullable=False),
        sa.Column("server_state", sa.Text, nullable=False),
        sa.Column("server", sa.String, nullable=False, server_default=""),
        sa.Column("revision", sa.Integer, nullable=False, server_default="0"),
        sa.Column("size", sa.Integer, nullable=False, server_default="0"),
    )
    op.create_table(
        "attempts",
        sa.Column("server", sa.String, primary_key=True),
        sa.Column("job", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("restart", sa.Integer, nullable=False),
        sa.Column("world_size", sa.Integer, nullable=False),
        sa.Column("hosts", sa.Text, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("opened_at", sa.String, nullable=False),
        sa.Column("last_seen_at", sa.String, nullable=False),
    )
    op.create_table(
        "deliveries",
        sa.Column("incident", sa.String(26), primary_key=True),
        sa.Column("event", sa.String, primary_key=True),
        sa.Column("channel", sa.String(16), primary_key=True),
        sa.Column("server", sa.String, nullable=False),
    )
