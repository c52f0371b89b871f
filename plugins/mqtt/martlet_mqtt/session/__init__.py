"""A client from CONNECT to its will: handshake, login, session, end."""
