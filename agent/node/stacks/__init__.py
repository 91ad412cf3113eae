"""Stacks of ranks, by py-spy or by the ranks themselves."""
