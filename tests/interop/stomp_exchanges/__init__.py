"""Exchanges that show how a STOMP broker behaves: each returns, in a few words, what the broker answered.

Nothing here waits for a time to pass to see that nothing comes: a queue is in order, so what did not come before a
later message does not come.
"""

from . import acknowledgements, connections, errors, messages, subscriptions, transactions
from .place import EXCHANGES, Place

__all__ = [
    "EXCHANGES",
    "Place",
    "acknowledgements",
    "connections",
    "errors",
    "messages",
    "subscriptions",
    "transactions",
]
