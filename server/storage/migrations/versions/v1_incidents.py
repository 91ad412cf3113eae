"""Incidents. A database that is older than the migrations already has this table."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("incidents"):
        return
    op.create_table(
        "incidents",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("job", sa.String, nullable=False, index=True),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("opened_at", sa.String, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("memory", sa.Text, nullable=False),
    )
