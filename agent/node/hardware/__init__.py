"""Evidence that lies on the host: one module for each source, and the monitor that reads them."""
