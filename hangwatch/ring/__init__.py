"""The memory-mapped file in which a training process records its calls: its layout, and its
readers.
"""
