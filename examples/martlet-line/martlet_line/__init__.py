"""A line protocol that pushes messages and works with netcat."""
