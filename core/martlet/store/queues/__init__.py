"""Queues: positions of the messages of a topic (RocketMQ's ConsumeQueue), and their journal."""
