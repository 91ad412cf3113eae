"""Composes what changed into heartbeats and sends them to the server."""
