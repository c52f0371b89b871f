"""Predicates on the properties of messages in SQL92: for RocketMQ consumers, STOMP selectors and MQTT subscribers."""
