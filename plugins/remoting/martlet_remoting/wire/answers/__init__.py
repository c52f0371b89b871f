"""Decoders of the answers of brokers and name servers, for clients; need no event loop."""
