"""The diagnosis from PyTorch Flight Recorder dumps alone."""
