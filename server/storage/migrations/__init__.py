"""The database's schema, step by step: Alembic's scripts, which bring an older database to the
present form.
"""
