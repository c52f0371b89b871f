"""Handlers of requests, by subject; every module has its table of request codes."""
