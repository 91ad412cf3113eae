"""What every part of the server needs: clocks, limits, errors, the event loop."""
