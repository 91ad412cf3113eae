"""The identity of a rank, from its environment variables, and the directory that it shares with the
node agent.
"""
