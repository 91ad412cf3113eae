"""How calls perform, added up over all ranks."""
