"""Arguments of ActiveMQ (``activemq.NAME``) and RabbitMQ (``x-NAME``): honoured, or refused; pure functions.

A client that asks for something, such as the longest length of a queue, relies on it. So an argument that the broker
does not support is an ERROR, and so is an unknown argument of SUBSCRIBE.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final

from martlet_stomp.wire.errors import StompError, shown

__all__ = ["check_flag", "check_send_arguments", "check_subscribe_arguments"]

_ARGUMENT: Final = re.compile(r"activemq\.|x-")
_ANY: Final[Collection[str]] = ()
_FLAG: Final = ("true", "false")
# Arguments of SUBSCRIBE with the values that the broker honours, or that ask for its usual behaviour. Empty if the
# values are not checked here.
_HONOURED: Final[dict[str, Collection[str]]] = {
    "activemq.dispatchAsync": _FLAG,
    "activemq.exclusive": _FLAG,
    "activemq.maximumPendingMessageLimit": ("0", "-1"),
    "activemq.noLocal": _FLAG,
    "activemq.prefetchSize": _ANY,
    "activemq.priority": ("0",),
    "activemq.retroactive": _FLAG,
    "activemq.subcriptionName": _ANY,
    "activemq.subscriptionName": _ANY,
    "x-cancel-on-ha-failover": _FLAG,
    "x-initial-cluster-size": _ANY,
    "x-priority": ("0",),
    "x-queue-leader-locator": ("client-local", "balanced", "least-leaders", "random"),
    "x-queue-mode": ("default", "lazy"),
    "x-queue-type": ("classic", "quorum"),
    "x-queue-version": ("1", "2"),
    "x-single-active-consumer": _FLAG,
}
# Flags without a prefix.
_FLAGS: Final = frozenset(("auto-delete", "browser", "durable", "exclusive", "no-local"))
_CONSUMERS: Final = "use activemq.exclusive for the one consumer that gets everything"
_LENGTH: Final = "messages are kept for store.file_reserved_hours"
_LETTERS: Final = "dead letters are in the topic stomp.dead_letters"
# Queue arguments of RabbitMQ, which SEND may have, too; other headers of SEND belong to the message.
_OF_QUEUES: Final = {
    "x-dead-letter-exchange": _LETTERS,
    "x-dead-letter-routing-key": _LETTERS,
    "x-dead-letter-strategy": _LETTERS,
    "x-delivery-limit": "set stomp.redeliveries_max",
    "x-expires": "queues without consumers keep their messages for store.file_reserved_hours",
    "x-max-age": _LENGTH,
    "x-max-length": _LENGTH,
    "x-max-length-bytes": _LENGTH,
    "x-max-priority": "messages come in the order in which they were sent",
    "x-message-ttl": "send messages with the header expiration",
    "x-overflow": _LENGTH,
    "x-queue-type": "use classic or quorum",
    "x-stream-offset": "use activemq.retroactive:true to read a topic from its first message on",
}
_HINTS: Final = _OF_QUEUES | {
    "activemq.maximumPendingMessageLimit": "a slow subscription loses nothing, its messages wait in the log",
    "activemq.priority": _CONSUMERS,
    "transformation": "messages come as they were sent",
    "x-priority": _CONSUMERS,
    "x-queue-name": "use durable:true, and the same id each time",
}


def check_subscribe_arguments(headers: Mapping[str, str]) -> None:
    """Raise `StompError` if SUBSCRIBE with *headers* has an argument that the broker does not support."""
    for name, value in headers.items():
        if name in _FLAGS:
            check_flag("SUBSCRIBE", name, value)
        elif _ARGUMENT.match(name) or name == "transformation":
            values = _HONOURED.get(name)
            if values is _FLAG:
                check_flag("SUBSCRIBE", name, value)
            elif values is None or (values and value.strip() not in values):
                _refuse("SUBSCRIBE", name, value)


def check_flag(command: str, name: str, value: str) -> None:
    """Raise `StompError` unless *value* is ``true`` or ``false``, in any case; a client relies on either."""
    if value.strip().lower() not in _FLAG:
        raise StompError(f"{command} has {name}:{shown(value)}; use true or false")


def check_send_arguments(headers: Collection[tuple[str, str]]) -> None:
    """Raise `StompError` if SEND with *headers* asks for a queue that the broker does not have."""
    for name, value in headers:
        if name in _OF_QUEUES and value.strip() not in _HONOURED.get(name, ()):
            _refuse("SEND", name, value)


def _refuse(command: str, name: str, value: str) -> None:
    hint = _HINTS.get(name, f"known arguments are {', '.join(sorted(_HONOURED))}")
    raise StompError(f"{command} has {name}:{shown(value)}, which the broker does not do; {hint}")
