"""A line protocol that pushes: a Martlet plugin that one can speak with netcat."""
