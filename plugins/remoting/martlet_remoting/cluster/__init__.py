"""Name servers and other brokers: registration, and queues of topics on other brokers."""
