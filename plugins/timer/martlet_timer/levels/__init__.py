"""Delay levels: messages that wait for the delay of their level, in RocketMQ's schedule topic."""
