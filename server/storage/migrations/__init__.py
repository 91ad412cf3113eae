"""The database's schema, step by step: Alembic's scripts, which upgrade an older database."""
