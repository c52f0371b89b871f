"""Handlers of requests, by subject; each module has its table of request codes."""
