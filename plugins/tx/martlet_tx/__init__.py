"""Transactional messages, in RocketMQ's topics and formats: half messages, op records, check-back."""
