"""The `hangwatch` command."""

from .entry import main

__all__ = ["main"]
