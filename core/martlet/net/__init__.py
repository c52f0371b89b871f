"""Sockets, TLS and connections: everything that talks to the network."""
