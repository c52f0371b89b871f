"""RocketMQ's timer files: read after RocketMQ has used the store, and written for it at shutdown."""
