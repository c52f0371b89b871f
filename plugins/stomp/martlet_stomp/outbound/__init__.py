"""Messages to a client: its subscriptions, where their messages come from, and what is outstanding."""
