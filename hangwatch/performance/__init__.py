"""Performance of calls: distributions, bandwidths and stragglers."""
