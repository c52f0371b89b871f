"""Messages to a client: its cursor, its shared subscriptions, its messages in flight, and its frames."""
