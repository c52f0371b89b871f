"""Requests of administrators, and the metrics under ``$SYS``."""
