"""The index by message key (RocketMQ's IndexFile)."""
