"""MQTT's messages as records of the log, and records as frames for subscribers; no input or output."""
