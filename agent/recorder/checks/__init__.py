"""Opt-in checks of the data in collectives: HANGWATCH_CHECKS=replicas,nonfinite,values. Without it,
only `settings` is imported.

`settings` reads the environment, `kernel` replaces the recorder's kernel, `inspection` decides what
to examine of a call and when, `tensors` examines it, `nonfinite` tracks calls with NaN or Inf,
`scaling` tracks loss scaling, and `table` writes the results into the ring.
"""
