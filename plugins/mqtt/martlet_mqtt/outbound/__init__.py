"""Messages to a client: its cursor, shared subscriptions, what is in flight, and its frames."""
