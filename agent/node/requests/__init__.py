"""Executes the server's requests to a node agent."""
