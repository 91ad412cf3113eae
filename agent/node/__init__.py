"""The node agent: one process per host that does all that may block. It reads rings and /proc, runs
py-spy, and talks to the server.
"""
