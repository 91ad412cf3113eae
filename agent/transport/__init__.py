"""HTTP from a training node to the server."""
