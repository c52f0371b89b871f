"""Requests of administrators, and the figures under ``$SYS``."""
