"""Delayed messages: RocketMQ's delay levels."""
