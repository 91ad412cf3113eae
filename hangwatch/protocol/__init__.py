"""The messages between node agents and the server."""
