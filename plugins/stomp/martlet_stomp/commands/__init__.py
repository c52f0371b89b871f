"""The commands ``martlet stomp ...``, which speak STOMP 1.2 with a broker."""
