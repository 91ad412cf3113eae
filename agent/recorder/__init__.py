"""The half of the agent that lives inside the training process: it only writes to its ring."""
