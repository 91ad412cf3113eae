"""What the server requests of a node agent, other than stacks."""
