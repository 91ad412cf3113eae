"""The `hangwatch` command."""
