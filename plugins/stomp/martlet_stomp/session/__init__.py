"""A client from CONNECT to its end: login, session, the parts that serve it."""
