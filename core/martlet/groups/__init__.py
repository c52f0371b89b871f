"""Shared groups: consumers that compete for messages, with leases and retries, state in the log."""
