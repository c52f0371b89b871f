"""Topics: create, change, delete, list (RocketMQ AdminBrokerProcessor)."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

import orjson

from martlet.access import TopicAdminGrant
from martlet.broker import Broker
from martlet.contracts import Timers
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet.tables.topics import RESERVE_TIME, SYSTEM_PREFIX, SYSTEM_TOPICS, TIMER_TOPIC, Topic, check_name
from martlet_remoting.cluster.registrar import standard_topics
from martlet_remoting.handlers.admin.common import existing_topic, saved, version_of
from martlet_remoting.handlers.bodies import boolean, integer, items, read_body
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import Lazy, dumps, dumps_in_steps
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.routes import Version

__all__ = ["TABLE", "Allowed", "alter_attributes", "is_system", "page", "system_topics"]

T = TypeVar("T")

DIGITS_MAX: Final = 20
# Martlet's own fields of a request to change a topic, and of its answer.
FORCE: Final = "force"
LOST: Final = "lostMessages"
TOPIC_US: Final = 60.0  # a change notifies name servers, shared groups and subscriptions

# The allowed values of an attribute: some words, or the numbers of a range.
Allowed: TypeAlias = tuple[str, ...] | range
# RocketMQ TopicAttributes.
ATTRIBUTES: Final[Mapping[str, Allowed]] = {
    "queue.type": ("BatchCQ", "SimpleCQ", "RocksDBCQ"),
    "cleanup.policy": ("DELETE", "COMPACTION"),
    "message.type": ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "LITE"),
    RESERVE_TIME: range(-1, 1 << 63),  # hours; -1 and 0 mean the log's retention
}
# Attributes that cannot be changed later, because they determine how a topic is stored.
FIXED: Final = frozenset(("queue.type", "cleanup.policy"))
# The store has one kind of queue and removes messages by age.
SUPPORTED: Final[Mapping[str, str]] = {"queue.type": "SimpleCQ", "cleanup.policy": "DELETE"}


def system_topics(broker: Broker) -> list[str]:
    """Return the topics that clients can neither change nor delete."""
    held = [TIMER_TOPIC] if broker.capability(Timers) is not None else []
    return list(dict.fromkeys([*SYSTEM_TOPICS, *held, *(topic.name for topic in standard_topics(broker))]))


def is_system(broker: Broker, name: str) -> bool:
    """Return whether *name* is a system topic."""
    return name.startswith(SYSTEM_PREFIX) or name in system_topics(broker)


def _changeable(context: RequestContext, command: Command, name: str) -> TopicAdminGrant:
    """Return the grant to change topic *name*. Raises `Refused` for a system topic."""
    grant = context.gate(command).admin.topic(name)
    check_name(name)
    if is_system(context.state.broker, name):
        raise Refused(Reason.PARAMETER, f"The topic[{name}] is conflict with system topic.")
    return grant


def alter_attributes(
    old_attributes: Mapping[str, str],
    changes: Mapping[str, str],
    *,
    new: bool,
    known: Mapping[str, Allowed] = ATTRIBUTES,
) -> dict[str, str]:
    """Return *old_attributes* after *changes*: ``+name`` sets an attribute, ``-name`` removes it (AttributeUtil).

    *known* has all attributes with their allowed values.

    Raises:
      Declined: a key has no sign or is unknown, or a value is invalid (SYSTEM_ERROR).
      Refused: the message type is MIXED (PARAMETER).
    """
    if changes.get("+message.type") == "MIXED":
        raise Refused(Reason.PARAMETER, "MIXED message type is not supported.")
    attributes = dict(old_attributes)
    for key, value in changes.items():
        sign, name = key[:1], key[1:]
        if sign not in ("+", "-"):
            raise _bad_attribute(f"wrong format key: {key!r:.80}; it must begin with + (set) or - (remove)")
        if new and sign == "-":
            raise _bad_attribute(f"only add attribute is supported while creating topic. key: {name:.80}")
        if name not in known:
            raise _bad_attribute(f"unsupported key: {name:.80}; attributes are {', '.join(known)}")
        if not new and name in FIXED and attributes.get(name, SUPPORTED[name]) != value:
            raise _bad_attribute(f"attempt to update an unchangeable attribute. key: {name}")
        if sign == "+":
            attributes[name] = _checked_attribute(name, value, known[name])
        elif attributes.pop(name, None) is None:
            raise _bad_attribute(f"attempt to delete a nonexistent key: {name}")
    return attributes


def _bad_attribute(remark: str) -> Declined:
    return Declined(ResponseCode.SYSTEM_ERROR, remark)


def _checked_attribute(name: str, value: str, allowed: Allowed) -> str:
    if isinstance(allowed, range):
        digits = value.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < DIGITS_MAX):
            raise _bad_attribute(f"attribute {name} is {value!r:.80}; it must be a number")
        if int(value) not in allowed:
            text = f"value is not in range({allowed.start}, {allowed.stop - 1})"
            raise _bad_attribute(f"{text}; attribute {name} is {value}")
    elif value not in (allowed := (SUPPORTED[name],) if name in SUPPORTED else allowed):
        raise _bad_attribute(f"value is not in set: [{', '.join(allowed)}]; attribute {name} is {value!r:.80}")
    return value


def parse_attributes(text: str) -> dict[str, str]:
    """Return the attributes in ``+key=value,-key`` (AttributeParser).

    Raises:
      Declined: a key is repeated, a +key has no value, or a -key has one (SYSTEM_ERROR).
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        key, separator, value = part.strip().partition("=")
        key = key.strip()
        if separator and not key.startswith("+"):
            raise _bad_attribute(f"add/alter attribute format is wrong: {key:.80}; write +key=value")
        if not separator and not key.startswith("-"):
            raise _bad_attribute(f"delete attribute format is wrong: {key:.80}; write -key")
        if key in found:
            raise _bad_attribute(f"key duplication: {key:.80}; name each attribute once")
        found[key] = value.strip()
    return found


def update_topic(context: RequestContext, command: Command) -> bytes | Steps[bytes]:
    """Create or change a topic; listeners of the topic table inform the name servers.

    A removed queue stays readable until its messages are consumed. With Martlet's own field *force* it is dropped at
    once, and the answer has the number of lost messages.
    """
    name = command.text("topic")
    grant = _changeable(context, command, name)
    if command.boolean(FORCE):
        return _force_update(context, command, grant)
    _update(grant, command)
    return reply(command)


def _force_update(context: RequestContext, command: Command, grant: TopicAdminGrant) -> Steps[bytes]:
    broker, old_topic, lost_messages = context.state.broker, grant.get(), 0
    if old_topic is not None:
        queues_left = max(command.integer("readQueueNums"), command.integer("writeQueueNums"))
        lost_messages = (yield from broker.draining.unread(old_topic, queues_left)).messages
    topic = _update(grant, command, force=True)
    yield from broker.draining.drop(topic)
    return reply(command, {LOST: lost_messages})


def _update(grant: TopicAdminGrant, command: Command, *, force: bool = False) -> Topic:
    held = grant.get()
    attributes = alter_attributes(
        held.attributes if held else {}, parse_attributes(command.text("attributes", "")), new=held is None
    )
    return grant.update(
        command.integer("readQueueNums"),
        command.integer("writeQueueNums"),
        command.integer("perm"),
        command.integer("topicSysFlag", 0),
        command.boolean("order"),
        attributes,
        command.text("topicFilterType", "SINGLE_TAG"),
        force=force,
    )


def update_topics(context: RequestContext, command: Command) -> Steps[bytes]:
    """Create or change many topics: all, or none if one name is invalid."""
    wanted = items((yield from read_body(command)), "topicConfigList")
    budget = Budget(TOPIC_US)
    grants: list[TopicAdminGrant] = []
    for fields in wanted:
        grants.append(_changeable(context, command, str(fields.get("topicName") or "")))
        if budget.is_over():
            yield
    for grant, fields in zip(grants, wanted, strict=True):
        _update_from_json(grant, fields)
        if budget.is_over():
            yield
    return reply(command)


def _update_from_json(grant: TopicAdminGrant, fields: dict[object, object]) -> Topic:
    old_topic = grant.get()
    attributes = fields.get("attributes")
    attribute_changes = (
        {str(key): str(value) for key, value in attributes.items()} if isinstance(attributes, dict) else {}
    )
    return grant.update(
        integer(fields, "readQueueNums", 16),
        integer(fields, "writeQueueNums", 16),
        integer(fields, "perm", 6),
        integer(fields, "topicSysFlag"),
        boolean(fields, "order"),
        alter_attributes(old_topic.attributes if old_topic else {}, attribute_changes, new=old_topic is None),
        str(fields.get("topicFilterType") or "SINGLE_TAG"),
    )


def delete_topic(context: RequestContext, command: Command) -> bytes:
    """Delete a topic with its messages and the groups' offsets in it; no error if it does not exist."""
    name = command.text("topic")
    if not name.strip():
        raise Refused(Reason.PARAMETER, "The specified topic is blank.")
    grant = context.gate(command).admin.topic_deletion(name)
    if is_system(context.state.broker, name):
        raise Refused(Reason.PARAMETER, f"The topic[{name}] is conflict with system topic.")
    grant.delete()
    return reply(command)


def all_topics(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer all topics, or one page of them."""
    grant = context.gate(command).queries.broker("list")
    table_version, topics = grant.topics_version, list(grant.topics())
    version = Version(table_version.counter, table_version.state_version, table_version.timestamp)
    topics_of_page = page(command, "topicSeq", "maxTopicNum", version, topics)
    body = yield from dumps_in_steps(
        {
            "dataVersion": version.as_json(),
            "mappingDataVersion": Version().as_json(),
            "topicConfigTable": Lazy((topic.name, orjson.dumps(topic.as_json())) for topic in topics_of_page),
            "topicQueueMappingDetailMap": {},
            "topicQueueMappingInfoMap": {},
        }
    )
    return reply_in_pieces(command, body, {"totalTopicNum": len(topics)})


def page(command: Command, start_field: str, count_field: str, version: Version, found: Sequence[T]) -> Sequence[T]:
    """Return the requested page of *found*; the first page if the table has changed since the last request.

    *found* must be in order of insertion, which is stable between changes.
    """
    count = command.integer(count_field, 0)
    if count <= 0:
        return found
    start = max(command.integer(start_field, 0), 0) if version_of(command.text("dataVersion", "")) == version else 0
    return found[start : start + count]


def one_topic(context: RequestContext, command: Command) -> bytes:
    """Answer one topic's configuration."""
    name = command.text("topic")
    return reply(command, body=dumps(existing_topic(context.gate(command).queries.topic(name)).as_json()))


def system_topic_list(context: RequestContext, command: Command) -> bytes:
    """Answer the names of system topics, which clients cannot use."""
    context.gate(command).queries.broker("list")
    return reply(command, body=dumps({"topicList": system_topics(context.state.broker)}))


def clean_unused_topics(context: RequestContext, command: Command) -> Steps[bytes]:
    """Remove stored messages of topics that no longer exist."""
    yield from context.gate(command).admin.broker().delete_unused_topics()
    return reply(command)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.UPDATE_AND_CREATE_TOPIC: saved(update_topic),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: saved(update_topics),
    RequestCode.DELETE_TOPIC_IN_BROKER: saved(delete_topic),
    RequestCode.GET_ALL_TOPIC_CONFIG: all_topics,
    RequestCode.GET_TOPIC_CONFIG: one_topic,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: system_topic_list,
    RequestCode.CLEAN_UNUSED_TOPIC: saved(clean_unused_topics),
}
