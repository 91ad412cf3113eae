"""Stacks, recordings and traces on request."""
