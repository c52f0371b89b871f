"""Conversion of destinations and messages to topics and records of the log, and back; no input or output."""
