"""Everything that runs on a training node: the recorder in each rank, the node agent, and the
command line.
"""
