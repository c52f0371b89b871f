"""Identities of remoting clients: signatures of requests, and the gates of a connection."""
