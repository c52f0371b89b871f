"""Consumer groups: create, change, delete, list, forbid topics."""

from collections.abc import Mapping
from typing import Final

import orjson
from msgspec.structs import replace

from martlet.access import Gate, GroupAdminGrant
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet.tables.groups import Group, check_group_name
from martlet.tables.topics import check_name
from martlet_remoting.handlers.admin.common import saved
from martlet_remoting.handlers.admin.topics import Allowed, alter_attributes, page
from martlet_remoting.handlers.bodies import items, read_body
from martlet_remoting.handlers.context import Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.fastjson import Lazy, dumps, dumps_in_steps
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.routes import Version

__all__ = ["TABLE"]

GROUP_US: Final = 30.0
# RocketMQ SubscriptionGroupAttributes.
ATTRIBUTES: Final[Mapping[str, Allowed]] = {"priority.factor": range(101)}


def _group(gate: Gate, fields: Mapping[object, object]) -> tuple[GroupAdminGrant, Group]:
    """Return the group described by *fields*, and the grant to change it.

    The attributes in *fields* change the group's current ones.
    """
    table = {str(key): value for key, value in fields.items()}
    attribute_changes = table.pop("attributes", None)
    group = Group.from_json(table)
    grant = gate.admin.group(group.name)
    check_group_name(group.name)
    old_group = grant.get()
    changes = (
        {str(key): str(value) for key, value in attribute_changes.items()}
        if isinstance(attribute_changes, dict)
        else {}
    )
    attributes = alter_attributes(
        old_group.attributes if old_group else {}, changes, new=old_group is None, known=ATTRIBUTES
    )
    return grant, replace(group, attributes=attributes)


def update_group(context: RequestContext, command: Command) -> Steps[bytes]:
    """Create or change a group."""
    grant, group = _group(context.gate(command), (yield from read_body(command)))
    grant.update(group)
    return reply(command)


def update_groups(context: RequestContext, command: Command) -> Steps[bytes]:
    """Create or change many groups: all, or none if one is invalid."""
    wanted: list[tuple[GroupAdminGrant, Group]] = []
    budget = Budget(GROUP_US)
    for fields in items((yield from read_body(command)), "groupConfigList"):
        wanted.append(_group(context.gate(command), fields))
        if budget.is_over():
            yield
    for grant, group in wanted:
        grant.update(group)
        if budget.is_over():
            yield
    return reply(command)


def delete_group(context: RequestContext, command: Command) -> bytes:
    """Delete a group; with cleanOffset (5.x tools) or removeOffset (4.x tools) also its offsets."""
    name = command.text("groupName")
    grant = context.gate(command).admin.group_deletion(name)
    clean = command.boolean("cleanOffset") or command.boolean("removeOffset")
    grant.delete(clean_offsets=clean)
    return reply(command)


def all_groups(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer all groups, or one page of them."""
    grant = context.gate(command).queries.broker("list")
    table_version, all_names = grant.groups_version, grant.groups()
    version = Version(table_version.counter, table_version.state_version, table_version.timestamp)
    names = page(command, "groupSeq", "maxGroupNum", version, all_names)
    groups = filter(None, (grant.group(name).get() for name in names))
    body = yield from dumps_in_steps(
        {
            "dataVersion": version.as_json(),
            "forbiddenTable": grant.forbidden(),
            "subscriptionGroupTable": Lazy((group.name, orjson.dumps(group.as_json())) for group in groups),
        }
    )
    return reply_in_pieces(command, body, {"totalGroupNum": len(all_names)})


def one_group(context: RequestContext, command: Command) -> bytes:
    """Answer a group's configuration. Unlike RocketMQ, create no group: a mistyped or deleted one must not appear."""
    name = command.text("group")
    group = context.gate(command).queries.group(name).get()
    if group is None:
        raise Refused(Reason.NO_GROUP, f"No group in this broker. group: {name}; create it with updateSubGroup")
    return reply(command, body=dumps(group.as_json()))


def forbid(context: RequestContext, command: Command) -> bytes:
    """Answer whether a group is forbidden to read a topic; change it before if requested."""
    group, topic, gate = command.text("group"), command.text("topic"), context.gate(command)
    grant = gate.queries.group(group)
    if command.ext.get("readable") is not None:
        admin = gate.admin.group(group)
        check_group_name(group)
        check_name(topic)
        admin.set_forbidden(topic, readable=command.boolean("readable"))
    readable = not grant.is_forbidden(topic)
    return reply(command, body=dumps({"group": group, "readable": readable, "topic": topic}))


TABLE: Final[dict[int, Handle]] = {
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: saved(update_group),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: saved(update_groups),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: saved(delete_group),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: all_groups,
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: one_group,
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: saved(forbid),
}
