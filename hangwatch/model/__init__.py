"""What a rank, a call, a process group, a wait, a verdict and an incident are. Plain data; imports
nothing of the other packages.
"""
