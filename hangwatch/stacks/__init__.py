"""Stacks and profiles: whose code a frame is, what a thread is doing, and trees of many stacks."""
