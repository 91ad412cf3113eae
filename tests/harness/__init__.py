"""Runs real torchrun jobs against a real server, and compares what the server says with what it
must say.
"""
