"""The loop that diagnoses each attempt and reports what changed."""
