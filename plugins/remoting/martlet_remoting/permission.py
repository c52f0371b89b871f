"""Who may ask what: each request names what it touches, and the broker's authorizers decide.

A topic is named by its name, a consumer group by its retry topic ``%RETRY%<group>``, which is
where RocketMQ's rules for a group hold too, and the broker as a whole by the empty name. To
consume is to read both the topic and the group. ``docs/remoting.md`` has the whole table.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from martlet.errors import Reason, Refused
from martlet.tables.topics import RETRY_PREFIX

from .codes import RequestCode
from .context import Answer, Context, Handle
from .packets import Command

__all__ = [
    "READS",
    "check_read",
    "may_consume",
    "may_manage",
    "may_manage_group",
    "may_read",
    "may_read_group",
]

Check: TypeAlias = Callable[[Context, Command], None]


def _ask(context: Context, action: str, name: str) -> None:
    broker, identity = context.parts.broker, context.peer.identity
    if broker.authorizers and not broker.allowed(identity, action, name):
        raise Refused(Reason.NO_PERMISSION, f"{identity.name!r} may not {action} {_shown(name)}")


def _shown(name: str) -> str:
    if name.startswith(RETRY_PREFIX):
        return f"consumer group[{name.removeprefix(RETRY_PREFIX)}]"
    return f"topic[{name}]" if name else "the broker"


def may_read(context: Context, topic: str = "") -> None:
    """Raise `Refused` (NO_PERMISSION) unless the peer may read *topic*, or see the broker's own state."""
    _ask(context, "read", topic)


def may_read_group(context: Context, group: str) -> None:
    """Raise `Refused` (NO_PERMISSION) unless the peer may be a member of *group* and see its state."""
    _ask(context, "read", RETRY_PREFIX + group)


def may_consume(context: Context, group: str, *topics: str) -> None:
    """Raise `Refused` (NO_PERMISSION) unless the peer may read *topics* as a member of *group*."""
    for name in dict.fromkeys((RETRY_PREFIX + group, *topics)):
        _ask(context, "read", name)


def may_manage(context: Context, topic: str = "") -> None:
    """Raise `Refused` (NO_PERMISSION) unless the peer may administer *topic*, or the broker."""
    _ask(context, "manage", topic)


def may_manage_group(context: Context, group: str) -> None:
    """Raise `Refused` (NO_PERMISSION) unless the peer may administer *group*."""
    _ask(context, "manage", RETRY_PREFIX + group)


def _the_broker(context: Context, command: Command) -> None:
    may_read(context)


def _topic(context: Context, command: Command) -> None:
    may_read(context, command.text("topic"))


def _group_in(field: str) -> Check:
    def check(context: Context, command: Command) -> None:
        may_read_group(context, command.text(field))

    return check


# The administrative requests that change nothing; those that do ask for themselves.
READS: Final[dict[int, Check]] = {
    RequestCode.GET_ALL_TOPIC_CONFIG: _the_broker,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: _the_broker,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _the_broker,
    RequestCode.GET_ALL_CONSUMER_OFFSET: _the_broker,
    RequestCode.GET_BROKER_CONSUME_STATS: _the_broker,
    RequestCode.VIEW_BROKER_STATS_DATA: _the_broker,
    RequestCode.GET_PRODUCER_CONNECTION_LIST: _the_broker,
    RequestCode.GET_ALL_PRODUCER_INFO: _the_broker,
    RequestCode.GET_BROKER_CONFIG: _the_broker,
    RequestCode.GET_BROKER_RUNTIME_INFO: _the_broker,
    RequestCode.GET_BROKER_HA_STATUS: _the_broker,
    RequestCode.GET_TOPIC_CONFIG: _topic,
    RequestCode.GET_TOPIC_STATS_INFO: _topic,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: _topic,
    RequestCode.QUERY_CONSUME_TIME_SPAN: _topic,
    RequestCode.QUERY_CONSUME_QUEUE: _topic,
    RequestCode.QUERY_CORRECTION_OFFSET: _topic,
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: _group_in("group"),
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: _group_in("group"),
    RequestCode.GET_CONSUME_STATS: _group_in("consumerGroup"),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: _group_in("consumerGroup"),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: _group_in("group"),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: _group_in("group"),
}


def check_read(code: int, handle: Handle) -> Handle:
    """Return *handle* so that authorizers are asked first, where `READS` has the request *code*."""
    check = READS.get(code)
    if check is None:
        return handle

    def checked(context: Context, command: Command) -> Answer:
        if context.parts.broker.authorizers:
            check(context, command)
        return handle(context, command)

    return checked
