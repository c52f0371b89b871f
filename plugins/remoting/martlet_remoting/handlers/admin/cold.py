"""Requests for limits on a group's reads from the disk (RocketMQ AdminBrokerProcessor, cold data flow control)."""

from typing import Final

from martlet.errors import Reason, Refused
from martlet_remoting.handlers.context import Handle, RequestContext, reply
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.fastjson import dumps
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.properties import parse_properties

__all__ = ["TABLE"]

DIGITS_MAX: Final = 18
GROUP_BYTES_MAX: Final = 255


def set_limits(context: RequestContext, command: Command) -> bytes:
    """Set the limits in the body's lines ``group=bytes``: all, or none if one is invalid."""
    wanted = parse_properties(command.body)
    gate = context.gate(command)
    limits: dict[str, int] = {}
    for name, value in wanted.items():
        if gate.admin.group(name).get() is None:
            text = f"subscription group [{name:.80}] does not exist; create it with updateSubGroup"
            raise Refused(Reason.NO_GROUP, text)
        if not (value.isascii() and value.isdecimal() and len(value) <= DIGITS_MAX):
            raise Refused(Reason.PARAMETER, f"threshold {value!r:.80} is not a number of bytes; write 0 or more")
        limits[name] = int(value)
    context.state.cold.limits.update(limits)
    return reply(command)


def remove_limit(context: RequestContext, command: Command) -> bytes:
    """Remove the limit of the group in the body; no error if it has none."""
    if not 0 < len(command.body) <= GROUP_BYTES_MAX:
        raise Refused(Reason.PARAMETER, f"body of {len(command.body)} bytes is not the name of a group; send its name")
    name = command.body.decode("utf-8", "replace")
    context.gate(command).admin.group(name)
    context.state.cold.limits.pop(name, None)
    return reply(command)


def show_limits(context: RequestContext, command: Command) -> bytes:
    """Answer the limits, and the bytes that groups have read from the disk in the current window."""
    context.gate(command).queries.broker()
    return reply(command, body=dumps(context.state.cold.as_json()))


TABLE: Final[dict[int, Handle]] = {
    RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG: set_limits,
    RequestCode.REMOVE_COLD_DATA_FLOW_CTR_CONFIG: remove_limit,
    RequestCode.GET_COLD_DATA_FLOW_CTR_INFO: show_limits,
}
