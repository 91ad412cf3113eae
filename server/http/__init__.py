"""HTTP: the JSON API, access, metrics, and the requests of node agents."""
