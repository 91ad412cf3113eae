"""Stacks of ranks, by py-spy or by the ranks themselves, and the kernels on their GPUs."""
