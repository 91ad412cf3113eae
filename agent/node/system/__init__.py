"""Reads processes from the operating system, and runs the node agent as a daemon."""
