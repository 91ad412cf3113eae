"""What runs on a training node: the recorder inside each rank, the node agent beside them, and the
command line.
"""
