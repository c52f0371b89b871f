"""Administrators' requests."""
