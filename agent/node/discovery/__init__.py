"""Discovers the processes to watch, in the run directory and in /proc, and reads them."""
