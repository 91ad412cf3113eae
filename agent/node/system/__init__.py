"""Reads processes from the operating system; what the node agent's loop runs on."""
