"""Optional callbacks for training frameworks. They declare steps and phases, such as validation and
checkpoints, in which other ranks may wait for one.

Hangs are found without them. Each module imports its framework. Without an active recorder, their
declarations do nothing.
"""
