"""The script that Alembic runs to migrate, on the connection and in the transaction of
`hangwatch.server.storage.database.migrate`.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
