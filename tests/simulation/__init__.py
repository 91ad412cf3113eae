"""Jobs, node agents and HTTP servers that exist only in a test or a benchmark: no processes, no torch."""
