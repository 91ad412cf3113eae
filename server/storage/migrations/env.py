"""What Alembic runs to migrate: on the connection that `hangwatch.server.storage.store` hands over,
in its transaction.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
