"""What node agents and the server send each other."""
