"""Packets from a client: PUBLISH, SUBSCRIBE and UNSUBSCRIBE."""
