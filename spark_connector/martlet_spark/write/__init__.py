"""Writing topics: rows into messages, and the sink with its guarantees."""
