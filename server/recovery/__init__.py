"""Ending ranks that hang, so that their launcher restarts the job."""
