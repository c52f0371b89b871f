"""Martlet: a durable log that speaks many protocols."""
