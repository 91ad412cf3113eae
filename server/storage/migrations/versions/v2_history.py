"""Several servers in one database, attempts, undelivered alerts, and the sizes of incidents."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    op.add_column("incidents", sa.Column("server", sa.String, nullable=False, server_default=""))
    op.add_column(
        "incidents", sa.Column("revision", sa.Integer, nullable=False, server_default="0")
    )
    op.add_column("incidents", sa.Column("size", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE incidents SET size = length(body) + length(memory)")
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
        sa.Column("heard_at", sa.String, nullable=False),
    )
    op.create_table(
        "deliveries",
        sa.Column("incident", sa.String(26), primary_key=True),
        sa.Column("event", sa.String, primary_key=True),
        sa.Column("channel", sa.String(16), primary_key=True),
        sa.Column("server", sa.String, nullable=False),
    )
