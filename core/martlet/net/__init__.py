"""The network layer: sockets, TLS and connections."""
