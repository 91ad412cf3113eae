"""torch's real ProcessGroupNCCL on a machine without a GPU: stand-ins for the vendor's shared libraries. See README.md."""
