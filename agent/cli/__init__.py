"""The `hangwatch` command."""

from .main import main

__all__ = ["main"]
