"""Data directories that RocketMQ has written, or will open next."""
