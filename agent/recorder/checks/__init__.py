"""Opt-in checks of the data in collectives: HANGWATCH_CHECKS=replicas,nonfinite,values.

`settings` reads the environment, and is all that is imported without this variable. `inspection`
decides what to examine of a call and when, and `tensors` examines it.
"""
