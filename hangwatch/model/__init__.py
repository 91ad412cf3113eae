"""Plain data types: rank, call, process group, wait, verdict, incident. Imports no other package."""
