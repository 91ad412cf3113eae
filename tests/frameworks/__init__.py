"""Other people's frameworks under hangwatch: real programs, in an environment of their own. See README.md."""
