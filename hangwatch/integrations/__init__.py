"""Optional callbacks for training frameworks. They declare steps and phases, such as validation and
checkpoints, in which other ranks may wait for one.

Hangs are found without them. Each module imports its framework; without an active recorder, what
they declare does nothing.
"""
