"""What the operating system says of processes, and what the node agent itself needs of it."""
