"""Reads processes from the operating system, and makes the node agent a daemon."""
