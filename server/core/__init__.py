"""The parts that the whole server needs: clocks, limits, errors, the event loop."""
