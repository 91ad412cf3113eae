"""Opt-in checks of the data in collectives: HANGWATCH_CHECKS=replicas,nonfinite,values. Without
this variable, only `settings` is imported.

`settings` reads the environment, `inspection` decides what to examine of a call and when, and
`tensors` examines it.
"""
