"""Administrators' requests, and the metrics under ``$SYS``."""
