"""Verdicts and incidents for people: documents, and lines of text for a terminal."""
