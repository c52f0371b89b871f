"""What every part runs on: clocks, identifiers, slices of work on the event loop, memory."""
