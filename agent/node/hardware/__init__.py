"""What the host knows of its hardware: the sources, and the monitor that reads them."""
