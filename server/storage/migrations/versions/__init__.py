"""One module for each step. A released step is never changed."""
