"""What changed, and how it reaches the server."""
