"""The database, which outlives the server, and the worker that writes to it."""
