"""RocketMQ's timer files: taken over from it, and left for it."""
