"""Opt-in checks of what collectives carry: HANGWATCH_CHECKS=replicas,nonfinite,values. Without it
nothing but `asked` is imported.

`asked` reads the environment, `kernel` takes the place of the recorder's kernel, `look` decides
what to examine of a call and when, `examine` does it, `scaling` knows of loss scaling, and `table`
writes what was found into the ring.
"""
