"""The wait-for graph: which ranks wait for which, which are silent, and which form a cycle."""
