"""What the host knows of its hardware: a module for each source, and the monitor that reads them."""
