"""Arbitrary timers: messages that wait until a time of the wall clock, in RocketMQ's timer topic."""
