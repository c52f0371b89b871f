"""What happens to a connection before its protocol reads it: limits, PROXY headers, TLS or WebSocket, certificates."""
