"""The format of bytes that only the store writes: tags, notes, atomic groups, light queues."""
