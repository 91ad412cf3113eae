"""The wait-for graph: who waits for whom, who is silent, and which ranks form a cycle."""
