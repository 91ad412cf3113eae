"""The commands that show the server's view of a job."""
