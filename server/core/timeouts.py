"""How long the server waits for a client, in seconds."""

from __future__ import annotations

HEAD_S = 10.0  # for the headers of a request
BODY_S = 30.0  # for a whole request body
# For idle connections: longer than proxies keep theirs, and than the interval of heartbeats.
KEEP_ALIVE_S = 75
