"""The server's view for coding agents, over the Model Context Protocol: the tools, and their
answers from the documents of the API. Read-only.
"""
