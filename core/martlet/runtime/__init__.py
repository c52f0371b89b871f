"""The base of all parts: clocks, identifiers, slices of work on the event loop, memory."""
