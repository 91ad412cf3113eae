"""`hangwatch doctor`: finds what would keep hangwatch from working here, with the remedies."""
