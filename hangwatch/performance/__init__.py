"""How calls perform: distributions of latency and bandwidth, and stragglers."""
