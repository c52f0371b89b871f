"""Writing topics: encodes rows as messages, and sends them with the sink's guarantees."""
