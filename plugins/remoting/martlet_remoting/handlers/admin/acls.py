"""Users and rules of access control, for RocketMQ's tools (AdminBrokerProcessor 5.5.0, requests 3001 to 3010)."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from martlet.contracts import AccessControl, UserChange
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet_remoting.handlers.admin.acl_bodies import (
    acl_pieces,
    level_of,
    parse_policies,
    parse_resource,
    parse_subject,
    parse_user_change,
    refused,
    show_subject,
    user_info,
)
from martlet_remoting.handlers.bodies import read_body, text
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import dumps
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.unsupported import unsupported_text

__all__ = ["TABLE", "access_control", "told"]

T = TypeVar("T")

# RocketMQ's clients close a connection at a frame that is longer than 16 MiB.
LISTED_BYTES_MAX: Final = 15 << 20
# Sorting more names would take longer than a slice.
SORTED_MAX: Final = 10_000
# To find and write a user or a rule.
PIECE_US: Final = 12.0
USER_PREFIX: Final = "user:"

# RocketMQ's codes and texts for the refusals of `AccessControl`.
OF_CREATION: Final = {
    Reason.ILLEGAL: (ResponseCode.NO_PERMISSION, "The user is existed"),
    Reason.NO_PERMISSION: (ResponseCode.SYSTEM_ERROR, "The super user can only be create by super user"),
}
OF_CHANGE: Final = {
    Reason.NOT_FOUND: (ResponseCode.NO_PERMISSION, "The user is not exist"),
    Reason.NO_PERMISSION: (ResponseCode.NO_PERMISSION, "The super user can only be update by super user"),
}
OF_PROMOTION: Final = {
    **OF_CHANGE,
    Reason.NO_PERMISSION: (ResponseCode.SYSTEM_ERROR, "The super user can only be update by super user"),
}


def access_control(context: RequestContext, command: Command) -> AccessControl:
    """Return what changes users and rules. Raises `Declined` if no plugin offers it."""
    found = context.state.broker.capability(AccessControl)
    if found is None:
        raise Declined(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, unsupported_text(command.code))
    return found


async def told(work: Awaitable[T], texts: Mapping[Reason, tuple[int, str]]) -> T:
    """Return what *work* returns; a refusal becomes that of *texts*, with its own text after a semicolon."""
    try:
        return await work
    except Refused as error:
        code, text = texts.get(error.reason, (0, ""))
        if not text:
            raise
        raise Declined(code, f"{text}; {error}") from error


# users


async def create_user(context: RequestContext, command: Command) -> bytes:
    """Add the user that the header names and the body describes."""
    name, change, control = await _user_change(context, command)
    if change.password is None:
        hint = "answers contain no passwords, so copyUser cannot copy a new user; use createUser"
        raise refused(f"password can not be blank; {hint}")
    await told(control.create_user(name, change, context.gate(command).identity), OF_CREATION)
    return reply(command)


async def update_user(context: RequestContext, command: Command) -> bytes:
    """Change the password, type or status of a user."""
    name, change, control = await _user_change(context, command)
    texts = OF_PROMOTION if change.administrator else OF_CHANGE
    await told(control.update_user(name, change, context.gate(command).identity), texts)
    return reply(command)


async def _user_change(context: RequestContext, command: Command) -> tuple[str, UserChange, AccessControl]:
    context.gate(command).admin.broker()
    control = access_control(context, command)
    name = _username(command)
    return name, parse_user_change(await context.state.broker.turns.finish(read_body(command))), control


def _username(command: Command) -> str:
    name = command.text("username", "")
    if not name:
        raise Refused(Reason.PARAMETER, "The username is blank")
    if not name.strip():
        raise refused("username can not be blank")
    return name


async def delete_user(context: RequestContext, command: Command) -> bytes:
    """Delete a user and its rules; no error if there is none."""
    context.gate(command).admin.broker()
    control = access_control(context, command)
    name = command.text("username", "")
    if not name.strip():
        raise refused("username can not be blank")
    await told(control.delete_user(name, context.gate(command).identity), OF_CHANGE)
    return reply(command)


def get_user(context: RequestContext, command: Command) -> bytes:
    """Answer a user without its password; no body if there is none."""
    context.gate(command).queries.broker()
    user = access_control(context, command).user(_username(command))
    return reply(command) if user is None else reply(command, body=dumps(user_info(user)))


def list_users(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the users whose names contain the filter, without passwords."""
    context.gate(command).queries.broker()
    control = access_control(context, command)
    wanted = command.text("filter", "").strip()
    names = [name for name in control.user_names() if wanted in name]

    def write(name: str) -> Steps[Iterable[bytes]]:
        yield from ()
        user = control.user(name)
        return () if user is None else [dumps(user_info(user))]

    return (yield from _reply_with_list(command, _sorted(names), write))


def _sorted(names: list[str]) -> list[str]:
    return sorted(names) if len(names) <= SORTED_MAX else names


def _reply_with_list(
    command: Command, names: Iterable[str], write: Callable[[str], Steps[Iterable[bytes]]]
) -> Steps[Frame]:
    """Answer the list of what *write* returns for each name, in pieces or none; no body if it is empty."""
    budget, size = Budget(PIECE_US), 0
    frames: list[bytes] = []
    waiting: list[bytes] = []
    for name in names:
        pieces = yield from write(name)
        separator = b"," if size else b"["
        for piece in pieces:
            waiting.append(separator + piece)
            size += len(waiting[-1])
            separator = b""
            if size > LISTED_BYTES_MAX:
                advice = "filter by name" if command.code == RequestCode.AUTH_LIST_USER else "name a subject"
                raise Declined(ResponseCode.SYSTEM_ERROR, f"list has more than {LISTED_BYTES_MAX} bytes; {advice}")
            if budget.is_over():
                frames.append(b"".join(waiting))
                waiting.clear()
                yield
        if budget.is_over():
            yield
    return reply_in_pieces(command, [*frames, *waiting, b"]"]) if size else reply(command)


# rules


async def put_acl(context: RequestContext, command: Command) -> bytes:
    """Give a subject the rules in the body; each replaces the one of its policy about the same resource."""
    gate = context.gate(command)
    gate.admin.broker()
    control = access_control(context, command)
    body = await context.state.broker.turns.finish(read_body(command)) if command.body else {}
    if not body.get("policies"):
        raise Declined(ResponseCode.SYSTEM_ERROR, "The body of acl is null")
    subject = parse_subject(text(body, "subject") or command.text("subject", ""))
    rules = parse_policies(body, context.state.broker.config.cluster)
    if _is_unknown_user(control, subject):
        raise refused(f"The subject of {show_subject(subject)} is not exist.")
    # The custom rules come first: should the default ones be refused, nobody may do more than with all of them.
    for level in sorted(rules):
        await control.put_rules(subject, level, rules[level], gate.identity)
    return reply(command)


def _is_unknown_user(control: AccessControl, subject: str) -> bool:
    return subject.startswith(USER_PREFIX) and control.user(subject.removeprefix(USER_PREFIX)) is None


async def delete_acl(context: RequestContext, command: Command) -> bytes:
    """Delete the rule of a subject about a resource, by default of its custom policy, or all of the subject's rules."""
    gate = context.gate(command)
    gate.admin.broker()
    control = access_control(context, command)
    subject, shown = parse_subject(command.text("subject", "")), command.text("resource", "").strip()
    level = level_of(command.text("policyType", ""))
    resource = parse_resource(shown, context.state.broker.config.cluster) if shown else ""
    if _is_unknown_user(control, subject):
        raise refused("The subject is not exist.")
    if await context.state.broker.turns.finish(control.policy_in_steps(subject)) is None:
        raise refused("The acl is not exist.")
    await control.delete_rules(subject, level if resource else None, resource, gate.identity)
    return reply(command)


def get_acl(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the rules of a subject; no body if it has none."""
    context.gate(command).queries.broker()
    control = access_control(context, command)
    subject = parse_subject(command.text("subject", ""))
    if _is_unknown_user(control, subject):
        raise refused("The subject is not exist.")
    policy = yield from control.policy_in_steps(subject)
    body: list[bytes] = []
    budget = Budget(PIECE_US)
    for piece in acl_pieces(policy) if policy is not None else ():
        body.append(piece)
        if budget.is_over():
            yield
    return reply_in_pieces(command, body)


def list_acls(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the rules of subjects that contain a filter, about resources that contain another."""
    context.gate(command).queries.broker()
    control = access_control(context, command)
    of_subject, of_resource = command.text("subjectFilter", "").strip(), command.text("resourceFilter", "").strip()
    subjects = [subject for subject in control.subjects() if of_subject in show_subject(subject)]

    def write(subject: str) -> Steps[Iterable[bytes]]:
        policy = yield from control.policy_in_steps(subject)
        return () if policy is None else acl_pieces(policy, of_resource)

    return (yield from _reply_with_list(command, _sorted(subjects), write))


TABLE: Final[dict[int, Handle]] = {
    RequestCode.AUTH_CREATE_USER: create_user,
    RequestCode.AUTH_UPDATE_USER: update_user,
    RequestCode.AUTH_DELETE_USER: delete_user,
    RequestCode.AUTH_GET_USER: get_user,
    RequestCode.AUTH_LIST_USER: list_users,
    RequestCode.AUTH_CREATE_ACL: put_acl,
    RequestCode.AUTH_UPDATE_ACL: put_acl,
    RequestCode.AUTH_DELETE_ACL: delete_acl,
    RequestCode.AUTH_GET_ACL: get_acl,
    RequestCode.AUTH_LIST_ACL: list_acls,
}
