"""What runs on the master node: ingest, incidents, pages, alerts."""
