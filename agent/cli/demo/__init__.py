"""`hangwatch demo`: a server, a job of four ranks, a planted hang and its verdict."""
