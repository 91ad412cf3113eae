"""Which processes are watched: found in the run directory and in /proc."""
