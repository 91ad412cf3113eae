"""Stacks of ranks, by py-spy or faulthandler."""
