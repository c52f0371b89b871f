"""Delayed messages, of two kinds.

`levels`: a message waits for a length of time, by one of RocketMQ's delay levels. Each level is a queue, and because
all of its messages wait for the same time, an offset says which are delivered. `DelayClock` measures these lengths.

`timers`: a message waits until a time of the wall clock. A table in memory knows all pending ones. `DampedClock` is the
wall clock that they follow.

A level's message that retention is about to remove becomes a timer. In both, `stage` takes a message in when it is
sent, and `delivery` publishes it when it is due.
"""
