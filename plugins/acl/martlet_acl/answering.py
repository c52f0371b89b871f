"""Answers requests of the owner of the data directory, of a running broker or of the files alone.

A list is answered in pages, so that no answer takes long; changes between two pages may show in the second one.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar, cast, final

from msgspec.structs import asdict

from martlet.access.networks import plain_address
from martlet.access.questions import SEPARATOR, SHARED, question
from martlet.contracts import AccessRule, Action, Identity, Question, RuleLevel, UserChange
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Steps
from martlet.tables.topics import RETRY_PREFIX
from martlet_acl.administration import Administration
from martlet_acl.credentials import SecretKey
from martlet_acl.files import POLICIES
from martlet_acl.observations import Observations
from martlet_acl.policy.explanations import OTHER_RESOURCE, ConsideredRule, Explanation, explain_in_steps
from martlet_acl.policy.policies import LEVELS, Policies
from martlet_acl.policy.quotas import StoredQuota
from martlet_acl.policy.rules import ACTIONS, Rule
from martlet_acl.policy.subjects import ANONYMOUS
from martlet_acl.requests import (
    AclAnswer,
    AddImported,
    AddUser,
    ExplainRequest,
    ListGroups,
    ListKeys,
    ListQuotas,
    ListRules,
    ListUsers,
    Observe,
    Place,
    PutGroup,
    PutKey,
    PutRule,
    RemoveGroup,
    RemoveKey,
    RemoveQuota,
    RemoveRule,
    RemoveUser,
    Report,
    Request,
    SetQuota,
    SetUser,
    SwitchKey,
)
from martlet_acl.state import AclState
from martlet_acl.suggestions import Suggestions

__all__ = ["Requests"]

# Rows of an answer: rendering them takes some milliseconds.
PAGE: Final = 500
REPORT_PAGE: Final = 100  # each needs a decision
# Rules that an explanation shows; those about the resource come first.
EXPLAINED_MAX: Final = 1000
BEGIN: Final = (0, 0)

T = TypeVar("T")
Row: TypeAlias = dict[str, object]
Finish: TypeAlias = Callable[[Steps[Any]], Awaitable[Any]]


@final
class Requests:
    """Answers requests.

    Args:
      observations: None where no broker runs.
      finish: runs long work in slices.
    """

    def __init__(self, administration: Administration, observations: Observations | None, finish: Finish) -> None:
        self._administration = administration
        self._observations = observations
        self._finish = finish

    @property
    def _state(self) -> AclState:
        return self._administration.state

    async def answer(self, request: Request) -> AclAnswer:
        """Do what *request* says; a refusal is an answer as well."""
        try:
            return await self._do(request)
        except Refused as refused:
            return AclAnswer(error=str(refused), reason=refused.reason.value)

    async def _do(self, request: Request) -> AclAnswer:
        match request:
            case ListUsers() | ListKeys() | ListGroups():
                return self._list(request)
            case ListQuotas(subject, place):
                return self._list_quotas(subject, place)
            case ListRules(subject, place):
                return self._list_rules(subject, place)
            case Report(place):
                return self._report(place)
            case ExplainRequest():
                return await self._explain(request)
            case AddUser() | SetUser() | RemoveUser():
                await self._change_user(request)
            case PutKey(user, key, secret):
                await self._administration.put_key(user, key, SecretKey(secret))
            case SwitchKey(key, disabled):
                await self._administration.switch_key(key, disabled=disabled)
            case RemoveKey(key):
                await self._administration.delete_key(key)
            case PutGroup(name, groups):
                await self._administration.put_group(name, groups)
            case RemoveGroup(name):
                await self._administration.delete_group(name)
            case PutRule():
                rule = AccessRule(request.resource, request.actions, request.decision, request.networks)
                await self._administration.put_rules(request.subject, request.level, [rule], None)
                return AclAnswer([*self._notes("rule", request.subject), *_notes_on(request.resource)])
            case RemoveRule(subject, resource, level):
                if not await self._administration.delete_rules(subject, level, resource, None):
                    raise Refused(Reason.NOT_FOUND, f"{subject} has no {level} rule about {resource!r}")
            case SetQuota(subject, limits):
                quota = await self._administration.change_quota(subject, limits)
                return AclAnswer([_quota_row(subject, quota), *self._notes("quota", subject)])
            case RemoveQuota(subject):
                await self._administration.delete_quota(subject)
            case AddImported(users, rules):
                left_out = await self._administration.add_imported(users, rules)
                return AclAnswer([{"left_out": text} for text in left_out])
            case Observe(observe):
                await self._administration.set_observing(observe=observe)
                if observe and self._observations is not None:
                    self._observations.clear()
        return AclAnswer()

    def _notes(self, what: str, subject: str) -> list[Row]:
        """Return what may be a mistake in a new rule or quota of *subject*."""
        name = subject.removeprefix("user:")
        if name == subject or name in self._state.users:
            return []
        return [{"note": f"user {name!r} does not exist; the {what} counts as soon as he does"}]

    async def _change_user(self, request: AddUser | SetUser | RemoveUser) -> None:
        administration = self._administration
        if isinstance(request, RemoveUser):
            if not await administration.delete_user(request.name, None):
                raise Refused(Reason.NOT_FOUND, f"user {request.name!r} does not exist")
            return
        password = request.password.encode("utf-8", "surrogatepass") if request.password else None
        if isinstance(request, AddUser):
            change = UserChange(request.administrator, groups=request.groups, password=password)
            await administration.create_user(request.name, change, None)
            return
        change = UserChange(request.administrator, request.disabled, password=password)
        await administration.update_user(
            request.name, change, None, join=request.join, leave=request.leave, without_password=request.password == ""
        )

    # lists

    def _list(self, request: ListUsers | ListKeys | ListGroups) -> AclAnswer:
        state = self._state
        if isinstance(request, ListUsers):
            rows = [row for name in _page(state.users, request.place) for row in self._user_rows(name)]
            return AclAnswer(rows, _next(state.users, request.place))
        if isinstance(request, ListGroups):
            groups = state.policies.members.groups
            found = [_group_row(name, groups[name]) for name in _page(groups, request.place)]
            return AclAnswer(found, _next(groups, request.place))
        if request.user:
            if request.user not in state.users:
                raise Refused(Reason.NOT_FOUND, f"user {request.user!r} does not exist")
            return AclAnswer(list(_key_rows(state, request.user)))
        rows = [row for name in _page(state.secrets, request.place) for row in _key_rows(state, name)]
        return AclAnswer(rows, _next(state.secrets, request.place))

    def _user_rows(self, name: str) -> Iterator[Row]:
        user = self._administration.user(name)
        if user is not None:
            yield {
                "name": name,
                "administrator": user.administrator,
                "disabled": user.disabled,
                "groups": list(user.groups),
                "password": user.has_password,
                "keys": sum(not key.disabled for key in user.keys),
            }

    def _list_rules(self, wanted: str, place: Place) -> AclAnswer:
        policies = self._state.policies
        number, begin = place or BEGIN
        rows: list[Row] = []
        for subject in [wanted] if wanted else list(islice(policies, number, number + PAGE)):
            rules = _levels_and_rules(policies, subject)
            left = PAGE - len(rows)
            rows += [_rule_row(subject, *each) for each in rules[begin : begin + left]]
            if begin + left < len(rules):
                return AclAnswer(rows, (number, begin + left))
            number, begin = number + 1, 0
        return AclAnswer(rows, (number, 0) if not wanted and number < policies.subject_count else None)

    def _list_quotas(self, wanted: str, place: Place) -> AclAnswer:
        quotas = self._state.policies.quotas
        rows: list[Row] = []
        for subject in [wanted] if wanted else _page(quotas, place):
            quota = quotas.get(subject)
            if quota is not None:
                rows.append(_quota_row(subject, quota))
        return AclAnswer(rows, None if wanted else _next(quotas, place))

    def _report(self, place: Place) -> AclAnswer:
        if self._observations is None:
            raise Refused(Reason.NOT_FOUND, "no broker runs on this data directory; only a broker has a report")
        begin = (place or BEGIN)[0]
        found = self._observations.report()
        suggestions = Suggestions(self._state, found)
        rows = [{**asdict(each), "command": suggestions.of(each)} for each in found[begin : begin + REPORT_PAGE]]
        begin += REPORT_PAGE
        return AclAnswer(rows, (begin, 0) if begin < len(found) else None)

    # explanations

    async def _explain(self, request: ExplainRequest) -> AclAnswer:
        state = self._state
        explanation: Explanation = await self._finish(explain_in_steps(state.policies, _question(request)))
        verdict = explanation.verdict
        rows: list[Row] = [
            {
                "allowed": verdict.allowed,
                "rule": verdict.rule,
                "reason": verdict.reason,
                "subjects": list(explanation.subjects),
                "observe": state.observe,
                "user_exists": request.user == ANONYMOUS or explanation.question.identity.name in state.users,
                "steps": [_step_row(each, explanation.decisive) for each in explanation.steps],
            }
        ]
        for each in explanation.steps:
            rows += _considered_rows(state.policies, each)
        return AclAnswer(rows)


def _notes_on(resource: str) -> list[Row]:
    """Return what may be a mistake in a new rule on *resource*."""
    group = resource.removeprefix("topic:" + RETRY_PREFIX)
    if group == resource:
        return []
    return [{"note": f"the rule never counts: the retry topic of a group is asked about as group:{group}; write that"}]


def _page(entries: Iterable[T], place: Place) -> list[T]:
    begin = (place or BEGIN)[0]
    return list(islice(entries, begin, begin + PAGE))


def _next(entries: Sized, place: Place) -> Place:
    begin = (place or BEGIN)[0] + PAGE
    return (begin, 0) if begin < len(entries) else None


def _group_row(name: str, groups: tuple[str, ...]) -> Row:
    return {"name": name, "groups": list(groups)}


def _quota_row(subject: str, quota: StoredQuota) -> Row:
    return {"subject": subject, **asdict(quota)}


def _key_rows(state: AclState, name: str) -> Iterator[Row]:
    for key, secret in state.secrets_of(name).keys.items():
        yield {"user": name, "key": key, "disabled": secret.disabled}


def _levels_and_rules(policies: Policies, subject: str) -> list[tuple[RuleLevel, Rule]]:
    return [(level, rule) for level in LEVELS for rule in policies.rules_of(subject, level)]


def _rule_row(subject: str, level: RuleLevel, rule: Rule) -> Row:
    stored = rule.stored()
    return {
        "subject": subject,
        "level": level,
        "decision": stored.decision,
        "actions": list(stored.actions),
        "resource": stored.resource,
        "networks": list(stored.networks),
    }


def _question(request: ExplainRequest) -> Question:
    """Return what *request* asks. Raises `Refused`."""
    if request.action not in ACTIONS:
        raise Refused(Reason.PARAMETER, f"action {request.action!r} is unknown; write one of {', '.join(ACTIONS)}")
    kind, _, name = request.resource.partition(":")
    if kind == "name" and "/" not in name:
        raise Refused(Reason.PARAMETER, f"resource {request.resource!r} has no topic; write name:TOPIC/NAME")
    user = "" if request.user == ANONYMOUS else request.user.removeprefix("user:")
    if not user and request.user != ANONYMOUS:
        raise Refused(Reason.PARAMETER, f"user {request.user!r} has no name; write a name, or {ANONYMOUS}")
    if request.address and plain_address(request.address) is None:
        raise Refused(Reason.PARAMETER, f"address {request.address!r} is none; write an IPv4 or IPv6 address")
    asked = question(Identity(user), cast(Action, request.action), _gate_name(kind, name), request.address)
    if (asked.kind, asked.name) != (kind, name) or not _is_whole(kind, name):
        text = f"resource {request.resource!r} is none; write topic:NAME, group:NAME, name:TOPIC/NAME"
        hint = (
            f"; what it names is {asked.kind}:{asked.name}"
            if kind == "topic" and asked.name and asked.kind != kind
            else ""
        )
        raise Refused(Reason.PARAMETER, f"{text}, shared:SCOPE/GROUP or cluster{hint}")
    return asked


def _gate_name(kind: str, name: str) -> str:
    """Return the name by which the gate asks about a resource."""
    if kind == "group":
        return RETRY_PREFIX + name
    if kind == "shared":
        return SEPARATOR.join((SHARED, name))
    return name


def _is_whole(kind: str, name: str) -> bool:
    if kind in ("name", "shared"):
        return all(name.partition(SEPARATOR))
    return bool(name) or kind == "cluster"


def _step_row(step: Explanation, decisive: Explanation | None) -> Row:
    opinion = step.opinion
    said = "no rule matches" if opinion is None else "allowed" if opinion.allowed else "denied"
    return {"about": _about(step), "opinion": said, "decides": step is decisive}


def _about(explanation: Explanation) -> str:
    question = explanation.question
    return f"{question.kind}:{question.name}" if question.name else question.kind


def _considered_rows(policies: Policies, explanation: Explanation) -> list[Row]:
    """Return the rules that were considered, those about other resources last."""
    places = {
        id(rule): f"{POLICIES}, rules of {subject}, {level} rule {number}"
        for subject in explanation.subjects
        for level in LEVELS
        for number, rule in enumerate(policies.rules_of(subject, level), 1)
    }
    shown = sorted(explanation.rules, key=_is_about_others)[:EXPLAINED_MAX]
    return [
        {
            "about": _about(explanation),
            **_rule_row(each.subject, each.level, each.rule),
            "outcome": each.outcome,
            "place": places.get(id(each.rule), ""),  # it may have been removed meanwhile
        }
        for each in shown
    ]


def _is_about_others(rule: ConsideredRule) -> bool:
    return rule.outcome == OTHER_RESOURCE
