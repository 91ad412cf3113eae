"""One module for each kind of root cause."""
