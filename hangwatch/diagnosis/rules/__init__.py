"""The rules: each finds causes of one kind, or requests the evidence for them.

A module holds the rules on one subject, which share their evidence and their texts.
"""
