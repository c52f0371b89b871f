"""Background work of the store: checkpoints, and retention of segments and topics."""
