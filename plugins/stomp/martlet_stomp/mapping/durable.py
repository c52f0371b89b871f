"""Durable subscriptions to topics: what they are called, and who has them.

With ActiveMQ, ``client-id`` of CONNECT and ``activemq.subscriptionName`` name one; with RabbitMQ, ``durable:true``
makes ``id`` its name, unless ``auto-delete:true``. Each is a shared group of one member, so that messages wait for it,
and what is acknowledged stays so. The user is part of its name: nobody gets the subscription of another one.
"""

from typing import Final, NamedTuple, final
from urllib.parse import quote

from martlet_stomp.mapping.destinations import Kind
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import Subscribe, Unsubscribe

__all__ = ["Durable", "durable_group"]

# As long as a session's name may be.
NAME_BYTES_MAX: Final = 1000


@final
class Durable(NamedTuple):
    """A durable subscription: the platform topic, and its group there."""

    topic: str
    group: str


def durable_group(user: str, client_id: str | None, request: Subscribe | Unsubscribe, kind: Kind) -> str:
    """Return the group of the durable subscription that *request* is about; empty for none. Raises `StompError`."""
    name, owner = request.durable_name, client_id or ""
    if name is None and request.is_durable and not (isinstance(request, Subscribe) and request.auto_delete):
        name, owner = request.id, ""
    if kind is not Kind.TOPIC or name is None:
        return ""
    group = "/".join(("topic", *(quote(each, safe="") for each in (user, owner, name))))
    if len(group) > NAME_BYTES_MAX:
        text = f"the durable subscription has a name of {len(group)} bytes with its user and client-id"
        raise StompError(f"{text}; shorten them to {NAME_BYTES_MAX} together")
    return group
