"""What a process learns from its environment: its identity as a rank, and the directory it shares
with the node agent.
"""
