"""Alerts, and the channels that carry them."""
