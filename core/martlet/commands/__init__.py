"""What the ``martlet`` command does, one module a command; each is imported only when it is asked for."""
