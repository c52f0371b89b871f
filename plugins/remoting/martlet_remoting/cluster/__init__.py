"""Name servers and other brokers: registration, and what they have told."""
