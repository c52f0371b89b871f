"""Generated users, groups, rules, quotas and questions, small enough that they often meet."""

from collections.abc import Mapping, Sequence
from typing import Final

from hypothesis import strategies as st

from martlet.contracts import Identity, Question
from martlet.runtime.steps import finish_now
from martlet_acl.policy.document import PolicyDocument, StoredPolicies, StoredUser, decode_document, fill_policies
from martlet_acl.policy.policies import Policies
from martlet_acl.policy.quotas import LIMITS, StoredQuota
from martlet_acl.policy.rules import StoredRule

USERS: Final = ("alice", "b/c", "+", "50%", "é")
GROUPS: Final = ("g0", "g1", "g2", "g3")
ACTIONS: Final = ("publish", "subscribe", "create", "get")
SUBJECTS: Final = (*(f"user:{name}" for name in USERS), *(f"group:{name}" for name in GROUPS), "everybody", "anonymous")
NETWORKS: Final = ("10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "fd00::/8", "0.0.0.0/0", "10.1.2.3/9")
ADDRESSES: Final = ("10.1.2.3", "10.200.0.1", "192.0.2.1", "fd00::1", "2001:db8::1", "")


def decoded(data: bytes) -> PolicyDocument:
    """Return the document that *data* is."""
    return finish_now(decode_document(data))


def filled(document: PolicyDocument) -> Policies:
    """Return what *document* says."""
    return finish_now(fill_policies(document))


def joined(levels: Sequence[str]) -> str:
    return "/".join(levels)


def is_inside_topic(name: str) -> bool:
    """Whether there is something after the topic and its slash."""
    return bool(name.partition("/")[2])


def inside_topic(level: st.SearchStrategy[str], end: str = "") -> st.SearchStrategy[str]:
    """Names or patterns in the topic ``t``, of few levels."""
    levels = st.lists(level, min_size=0 if end else 1, max_size=2 if end else 3)
    return levels.map(lambda each: joined(("t", *each, *([end] if end else [])))).filter(is_inside_topic)


level = st.sampled_from(("a", "a", "b", "ab", "", "alice", "%2B"))
names = inside_topic(level)
RESOURCES: Final[Mapping[str, st.SearchStrategy[str]]] = {
    "topic": st.sampled_from(("a", "ab", "a*", "a*", "ab*", "*", "{user}", "a_{user}", "{user}*")),
    "group": st.sampled_from(("a", "ab", "a*", "a*", "ab*", "*")),
    "shared": st.sampled_from(("s/a", "s/ab", "s/*", "s*", "s/a*", "*", "s/{user}/#", "s/{user}*")),
    "name": st.one_of(
        inside_topic(level | st.sampled_from(("+", "+", "{user}"))),
        inside_topic(level | st.sampled_from(("+", "+", "{user}")), "#"),
        st.tuples(names, st.sampled_from(("*", "/*"))).map("".join),
        st.sampled_from(("*", "t*", "t/*", "t/#", "t/+", "u/#")),
    ),
}
NAMES: Final[Mapping[str, st.SearchStrategy[str]]] = {
    "topic": st.sampled_from(("a", "ab", "abc", "a_alice", "alice", "%2B", "b%2Fc2")),
    "group": st.sampled_from(("a", "ab", "abc")),
    "shared": st.sampled_from(("s/a", "s/ab", "s/alice/#", "s/%2B/#", "s/abc", "r/a", "")),
    "name": st.one_of(
        names,
        inside_topic(level | st.just("+")),
        inside_topic(level | st.just("+"), "#"),
        st.sampled_from(("t/#", "t/+", "t/+/#", "t/a/#/b", "t/a+", "t/a*", "t/{user}")),
    ),
    "cluster": st.just(""),
}
DECISIONS: Final = ("allow", "deny")
quotas = st.builds(StoredQuota, **dict.fromkeys(LIMITS[:-1], st.integers(0, 3)), refuses=st.booleans())


@st.composite
def policies_of(draw: st.DrawFn, kind: str, subject: str) -> tuple[StoredRule, ...]:
    """Rules about one kind, or about everything."""
    resources = st.sampled_from(("cluster", "*")) if kind == "cluster" else RESOURCES[kind].map(f"{kind}:".__add__)
    if subject == "anonymous":
        resources = resources.filter(lambda text: "{user}" not in text)
    rules = st.builds(
        StoredRule,
        resource=resources | resources | resources | st.just("*"),
        actions=st.lists(st.sampled_from((*ACTIONS, "all")), min_size=1, max_size=3, unique=True).map(tuple),
        decision=st.sampled_from(DECISIONS),
        networks=st.just(()) | st.lists(st.sampled_from(NETWORKS), max_size=2, unique=True).map(tuple),
    )
    return tuple(draw(st.lists(rules, max_size=5, unique_by=lambda rule: rule.resource)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[PolicyDocument, list[Question]]:
    """Users, their groups, groups in later groups, rules and quotas of some subjects, and questions about one kind."""
    kind = draw(st.sampled_from(("topic", "name", "name", "group", "shared", "cluster")))
    name = draw(st.sampled_from((*USERS, USERS[0], "")))
    further = tuple(draw(st.lists(st.sampled_from(GROUPS), max_size=1)))
    record = StoredUser(
        groups=tuple(draw(st.lists(st.sampled_from(GROUPS), max_size=2, unique=True))),
        administrator=draw(st.integers(0, 19)) == 7,
        disabled=draw(st.integers(0, 19)) == 7,
    )
    nesting = {
        group: tuple(draw(st.lists(st.sampled_from(GROUPS[number + 1 :]), max_size=2, unique=True)))
        for number, group in enumerate(GROUPS[:-1])
    }
    own = f"user:{name}" if name else "anonymous"
    subjects = draw(st.lists(st.sampled_from((own, *SUBJECTS)), min_size=1, max_size=4, unique=True))
    stored = {each: StoredPolicies(draw(policies_of(kind, each)), draw(policies_of(kind, each))) for each in subjects}
    questions = st.builds(
        Question,
        identity=st.just(Identity(name, further)),
        action=st.sampled_from(ACTIONS),
        kind=st.just(kind),
        name=NAMES[kind],
        address=st.sampled_from(ADDRESSES),
    )
    limited = draw(st.dictionaries(st.sampled_from((own, *SUBJECTS)), quotas, max_size=4))
    document = PolicyDocument({name: record} if name else {}, nesting, stored, quotas=limited)
    return document, draw(st.lists(questions, min_size=8, max_size=8))
