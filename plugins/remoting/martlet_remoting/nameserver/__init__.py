"""The name server: it knows the brokers and their topics."""
