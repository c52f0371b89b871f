"""The resources that rules name: a kind, and a pattern of names of this kind.

    topic:orders           the topic ``orders``; a consumer group is ``group:billing``
    topic:orders*          topics whose names begin with ``orders``
    topic:*                all topics
    name:mqtt/home/+/temp  names in the topic ``mqtt``; ``+`` is one level, ``#`` at the end any number of them
    shared:stomp/queue/a   a shared group of a protocol, ``scope/group``
    cluster                the broker itself
    *                      everything

``{user}`` in a pattern is the name of the user as one level. User names may contain ``/`` or be ``+``, which would make
the pattern match other names. So these characters are in percent encoding there: the user ``+4917`` has the level
``%2B4917``. STOMP encodes all special characters in its destinations, so the pattern matches both spellings.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias, final
from urllib.parse import quote

from msgspec import Struct

from martlet_acl.policy.errors import PolicyError

__all__ = ["ANYTHING", "CLUSTER", "KINDS", "Form", "Rank", "Resource", "expand", "levels_of_user", "parse_resource"]

KINDS: Final = ("topic", "name", "group", "shared", "cluster")
# A name of MQTT has 64 KiB at most, but no rule needs one.
TEXT_MAX: Final = 1024
USER: Final = "{user}"

# The forms of a pattern; those after "literal" match many names.
Form: TypeAlias = Literal["literal", "wildcards", "prefix", "any"]
# Orders the resources of all rules that match one name: the least comes first.
Rank: TypeAlias = tuple[int, int, int, int]

_BRACES: Final = re.compile(r"\{\w*\}")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_SPECIAL: Final = re.compile(r"[%/+#*]")


@final
class Resource(Struct, frozen=True, gc=False):
    """The parsed form of *text*; two resources are the same if their texts are.

    *is_template*: the pattern contains ``{user}``.
    """

    text: str
    kind: str
    form: Form
    is_template: bool = False

    @property
    def name(self) -> str:
        """The pattern without the kind, and without the ``*`` of a prefix."""
        name = self.text.partition(":")[2]
        return name[:-1] if self.form == "prefix" else name

    @property
    def rank(self) -> Rank:
        """The place of the resource among those that match the same name.

        RocketMQ's order (auth 5.5.0, AclAuthorizationHandler.comparePolicyEntries): a kind before ``*``, a literal name
        before a prefix before all names, the longer prefix first. For names with levels: the more literal levels the
        sooner, then patterns that end at a level, then prefixes that end inside one, then all that is below, where the
        deeper pattern comes first. So a resource comes before all others that match more.
        """
        match self.form:
            case "literal":
                return (0, 0, 0, 0)
            case "any":
                return (3 if self is ANYTHING or self.text == "*" else 2, 0, 0, 0)
            case "prefix":
                name = self.name
                depth = name.count("/")
                return (1, -depth, 2, -depth - 1) if name.endswith("/") else (1, -depth, 1, -len(name))
            case "wildcards":
                levels = self.name.split("/")
                is_deep = levels[-1] == "#"
                literal = len(levels) - levels.count("+") - is_deep
                return (1, -literal, 2, is_deep - len(levels)) if is_deep else (1, -literal, 0, 0)

    def __str__(self) -> str:
        return self.text.replace(":", " ", 1) if self.text != "*" else "everything"


ANYTHING: Final = Resource("*", "any", "any")
CLUSTER: Final = Resource("cluster", "cluster", "literal")


def parse_resource(text: str) -> Resource:
    """Return the resource that *text* names.

    Raises:
      PolicyError: it names none.
    """
    if text == ANYTHING.text:
        return ANYTHING
    if text == CLUSTER.text:
        return CLUSTER
    kind, colon, name = text.partition(":")
    check = _CHECKS.get(kind)
    if check is None or not colon:
        raise _wrong(text, f"has no kind; write one of {', '.join(_CHECKS)} and a colon before the name")
    if len(text) > TEXT_MAX:
        raise _wrong(text[:40], f"and so on has {len(text)} characters; {TEXT_MAX} are allowed")
    if not name or _UNPRINTABLE.search(text):
        raise _wrong(text, "has a control character" if name else "has no name; for all names write *")
    if name == "*" and kind != "cluster":
        return Resource(text, kind, "any")
    is_template = "{" in name and _has_user(text, name)
    stem, star, rest = name.partition("*")
    if rest:
        raise _wrong(text, "has a * that is not at its end; only prefixes such as a* can be written")
    return Resource(text, kind, check(text, stem, bool(star)), is_template)


def _wrong(text: str, what: str) -> PolicyError:
    return PolicyError(f"resource {text!r} {what}")


def _has_user(text: str, name: str) -> bool:
    found = set(_BRACES.findall(name))
    if unknown := sorted(found - {USER}):
        raise _wrong(text, f"has {unknown[0]}; the only name in braces is {USER}")
    return bool(found)


def _check_flat(text: str, stem: str, is_prefix: bool) -> Form:
    """Check the name of a topic or of a consumer group."""
    if "/" in stem:
        advice = f"; names inside a topic are name:{stem}" if text.startswith("topic") else ""
        raise _wrong(text, f"has a '/', which no {text.partition(':')[0]} has{advice}")
    if "+" in stem or "#" in stem:
        raise _wrong(text, "has a wildcard of topic filters; only name:topic/filter has these")
    return "prefix" if is_prefix else "literal"


def _check_shared(text: str, stem: str, is_prefix: bool) -> Form:
    scope, slash, group = stem.partition("/")
    if not is_prefix and not (slash and scope and group):
        raise _wrong(text, "is no scope/group; for a queue of STOMP write shared:stomp/queue/NAME")
    return "prefix" if is_prefix else "literal"


def _check_name(text: str, stem: str, is_prefix: bool) -> Form:
    levels = stem.split("/")
    topic, *inside = levels
    if not is_prefix and (not topic or not inside or inside == [""]):
        raise _wrong(text, "is no topic/name; for the topic itself write topic:NAME")
    for level in levels:
        if ("+" in level or "#" in level) and level not in ("+", "#"):
            raise _wrong(text, f"has a wildcard inside the level {level!r}; it must be a level of its own")
    if topic in ("+", "#"):
        raise _wrong(text, "has a wildcard for the topic; write the topic's name before the first '/'")
    if "#" in levels[:-1] or (is_prefix and "#" in levels):
        raise _wrong(text, "has a # before its end; it must be the last level")
    has_wildcards = "+" in levels or "#" in levels
    if is_prefix and has_wildcards:
        raise _wrong(text, "has both + and *; a prefix has no other wildcard")
    return "wildcards" if has_wildcards else "prefix" if is_prefix else "literal"


def _check_cluster(text: str, stem: str, is_prefix: bool) -> Form:
    raise _wrong(text, f"has a name; a rule about the broker itself is about {CLUSTER.text!r}")


_CHECKS: Final[Mapping[str, Callable[[str, str, bool], Form]]] = {
    "topic": _check_flat,
    "name": _check_name,
    "group": _check_flat,
    "shared": _check_shared,
    "cluster": _check_cluster,
}


def levels_of_user(name: str) -> tuple[str, ...]:
    """Return the spellings of a user's name as a level: one, or two if STOMP's differs; none for the empty name.

    No two users have a spelling in common: both are undone by the same decoding.
    """
    if not name:
        return ()
    usual = _SPECIAL.sub(lambda found: quote(found[0], safe=""), name)
    stomp = quote(name, safe="", errors="surrogatepass")
    return (usual,) if usual == stomp else (usual, stomp)


def expand(template: Resource, levels: tuple[str, ...]) -> tuple[Resource, ...]:
    """Return *template* with each of *levels* in place of ``{user}``."""
    return tuple(Resource(template.text.replace(USER, level), template.kind, template.form) for level in levels)
