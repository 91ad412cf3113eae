"""`hangwatch doctor`: what would keep hangwatch from working here, and the remedy for each."""
