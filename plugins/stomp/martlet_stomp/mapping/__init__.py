"""STOMP's destinations and messages as topics and records of the log; no input or output."""
