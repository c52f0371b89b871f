"""State of RocketMQ in a data directory that it has written."""
