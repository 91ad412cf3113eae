"""What outlives the server: the database and what writes to it."""
