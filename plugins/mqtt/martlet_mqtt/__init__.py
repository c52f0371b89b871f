"""MQTT 3.1, 3.1.1 and 5: messages in the log, sessions that are positions in it."""
