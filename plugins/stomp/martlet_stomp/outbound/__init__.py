"""Messages to a client: its subscriptions, their sources, and unacknowledged messages."""
