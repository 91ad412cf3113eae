"""The layout and the readers of the ring, in which a training process records its calls."""
