"""Delayed messages, of two kinds.

`levels`: a message waits for a length of time, set by one of RocketMQ's delay levels. Each level is a queue. All
messages of a level wait for the same time, so an offset separates delivered from waiting ones. `DelayClock` measures
these lengths.

`timers`: a message waits until a time of the wall clock. A table in memory has all pending timers. `DampedClock` is the
wall clock that timers follow.

A level's message that retention is about to remove becomes a timer. In both, `stage` holds a message when it is sent,
and `delivery` publishes it when it is due.
"""
