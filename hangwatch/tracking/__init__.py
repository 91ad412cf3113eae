"""The state of a job, as built up from heartbeats: attempts, processes, call streams and groups."""
