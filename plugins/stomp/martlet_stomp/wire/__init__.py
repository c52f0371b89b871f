"""Frames of STOMP and their bytes; no input or output."""
