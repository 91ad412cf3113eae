"""Heartbeats on their way in, and the commands that the replies carry."""
