"""Frames from a client: SEND, SUBSCRIBE, ACK and transactions."""
