"""hangwatch names the rank, the call and the line that hang a distributed PyTorch job."""

__version__ = "0.1.0"
