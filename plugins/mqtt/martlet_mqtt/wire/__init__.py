"""Packets of MQTT and their bytes; no input or output."""
