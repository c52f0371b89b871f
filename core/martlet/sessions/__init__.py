"""Sessions: filters, positions and messages in flight that outlive a connection, state in the log."""
