"""Conversion of MQTT messages to records of the log, and of records to frames for subscribers; no input or output."""
