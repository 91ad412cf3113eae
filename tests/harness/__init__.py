"""Runs real jobs against a real server, and compares its verdicts with the expected ones."""
