"""No protocol reaches around the gate: only the modules named here touch what lies behind it, for the reason given."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PLUGINS: Final = (*ROOT.glob("plugins/*/martlet_*"), *ROOT.glob("examples/martlet-*/martlet_*"))
# What a gate leads to, as attributes of a broker, and the classes that hold it.
BEHIND: Final = frozenset(
    (
        "authorizers",
        "cursors",
        "groups",
        "rules",
        "sessions",
        "shared_groups",
        "store",
        "subscriptions",
        "tails",
        "topics",
    )
)
PUBLISHING: Final = "publish"  # and all that begin with it
CLASSES: Final = frozenset(("Groups", "Sessions", "SharedGroups", "Store", "Subscriptions", "Topics"))
# Modules that need no gate, and why: they act for the broker, or only pass on what a gate granted.
ACL: Final = "plugins/acl/martlet_acl/"
MQTT: Final = "plugins/mqtt/martlet_mqtt/"
REMOTING: Final = "plugins/remoting/martlet_remoting/"
STOMP: Final = "plugins/stomp/martlet_stomp/"
TIERED: Final = "plugins/tiered/martlet_tiered/"
TIMER: Final = "plugins/timer/martlet_timer/"
TX: Final = "plugins/tx/martlet_tx/"
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    # Listens to what gates refuse or would refuse, and writes the audit trail to a file and a topic.
    f"{ACL}plugin.py": frozenset(("publish_all", "rules", "store", "topics")),
    # Makes its socket in the store's directory.
    f"{ACL}endpoint.py": frozenset(("store",)),
    # Keeps its files in the store's directory, and tells gates that users or rules have changed.
    f"{ACL}saved_state.py": frozenset(("rules", "store")),
    # Puts the shared state together; request handlers get none of these from it.
    f"{REMOTING}handlers/context.py": frozenset(("groups", "store", "topics")),
    # Tells the name server in this process which retry topics a heartbeat would create.
    f"{REMOTING}plugin.py": frozenset(("groups",)),
    # Tells name servers about the topics of this broker, and creates the standard ones.
    f"{REMOTING}cluster/registrar.py": frozenset(("topics",)),
    # Held by `context.py`'s shared state: members of groups, rates, request modes, and pulls, pops and bulk reads.
    f"{REMOTING}consumers/members.py": frozenset(("Groups",)),
    f"{REMOTING}consumers/rates.py": frozenset(("Store", "Topics")),
    f"{REMOTING}consumers/bulk_reads.py": frozenset(("Store",)),
    f"{REMOTING}consumers/long_poll.py": frozenset(("Store", "Topics")),
    f"{REMOTING}consumers/pops.py": frozenset(("groups", "topics")),
    f"{REMOTING}consumers/request_modes.py": frozenset(("Groups", "Topics")),
    # Takes over RocketMQ's pops before any client is served.
    f"{REMOTING}handover/revived_pops.py": frozenset(("groups", "shared_groups", "store", "topics")),
    # Keeps state, and appends again what retention is about to remove.
    "examples/martlet-latest/martlet_latest/__init__.py": frozenset(("publish", "store")),
    # Creates its topic, and the feed that all gates follow, on behalf of the broker.
    "examples/martlet-topics/martlet_topics/plugin.py": frozenset(("cursors", "topics")),
    # Copies the log to the cold tier on behalf of the broker; clients read it through the store.
    f"{TIERED}upload/deleted.py": frozenset(("Store",)),
    f"{TIERED}upload/uploader.py": frozenset(("Store",)),
    # Delivers messages on behalf of the broker, whose clients may not touch the schedule topic.
    f"{TIMER}levels/delivery.py": frozenset(("store",)),
    f"{TIMER}levels/due.py": frozenset(("store", "topics")),
    f"{TIMER}levels/rounds.py": frozenset(("publish_all", "store")),
    f"{TIMER}timers/delivery.py": frozenset(("store",)),
    f"{TIMER}timers/journal_writer.py": frozenset(("publish_all", "store")),
    f"{TIMER}timers/outcomes.py": frozenset(("store", "topics")),
    f"{TIMER}handover/exchange.py": frozenset(("store",)),
    f"{TIMER}timers/reader.py": frozenset(("Store",)),
    f"{TIMER}timers/recall.py": frozenset(("store",)),
    f"{TIMER}levels/stage.py": frozenset(("store",)),
    # Notes the offset of each level in the log on behalf of the broker.
    f"{TIMER}levels/state.py": frozenset(("publish_all", "store")),
    f"{TIMER}running.py": frozenset(("store",)),
    f"{TIMER}plugin.py": frozenset(("store", "topics")),
    # Keeps half messages, which no client reads or writes, and publishes what `Gate.transactions.end` has allowed.
    f"{TX}transactions.py": frozenset(("publish", "publish_all", "store", "topics")),
    f"{TX}checks.py": frozenset(("groups", "store")),
    f"{TX}plugin.py": frozenset(("topics",)),
    f"{TX}renewal.py": frozenset(("store",)),
    # Tells the store which messages the cold tier has, and reads none.
    f"{TIERED}reading/index.py": frozenset(("Store",)),
    # Stores the state of the broker beside the cold tier, for a restore.
    f"{TIERED}restore/capture.py": frozenset(("store",)),
    # Makes its socket in the store's directory.
    f"{TIERED}status.py": frozenset(("store",)),
    # Joins the uploader and the reader of the cold tier.
    f"{TIERED}tier.py": frozenset(("store",)),
    # Keep staged messages, and publish what `Gate.external.commit` has allowed.
    f"{TX}external/delivery.py": frozenset(("store", "topics")),
    f"{TX}external/journal_writer.py": frozenset(("store",)),
    f"{TX}external/renewal.py": frozenset(("store",)),
    f"{TX}external/staging.py": frozenset(("store",)),
    f"{TX}external/transactions.py": frozenset(("topics",)),
    # Creates the topics of its rules and the feed that all gates follow, and finds out when sessions end.
    f"{MQTT}plugin.py": frozenset(("cursors", "sessions", "store")),
    # Looks up whether a session exists before the gate opens it.
    f"{MQTT}session/handshake.py": frozenset(("sessions",)),
    # Counts what retention removed before a session came back, and reads no message.
    f"{MQTT}session/missed.py": frozenset(("sessions", "store")),
    # Reads what the gate's cursor allows: retained messages, and what a session has in flight.
    f"{MQTT}outbound/due.py": frozenset(("store",)),
    # Asks where the log ends.
    f"{MQTT}outbound/outgoing.py": frozenset(("store",)),
    # Keeps state, and appends again what retention is about to remove.
    f"{MQTT}shared/retained.py": frozenset(("Store",)),
    # Publishes wills of sessions without a client, through a gate for their owner.
    f"{MQTT}session/wills.py": frozenset(("sessions",)),
    # Counts and lists sessions; lists only after the gate allowed to manage the broker.
    f"{MQTT}admin/sys_topics.py": frozenset(("sessions",)),
    f"{MQTT}admin/control.py": frozenset(("sessions", "shared_groups")),
    # Creates the topics of the rules again.
    f"{MQTT}shared/context.py": frozenset(("topics",)),
    # Forgets the groups that no session has.
    f"{MQTT}outbound/unused_groups.py": frozenset(("sessions", "shared_groups")),
    # Asks which tag codes records have, hands the topics to `temporary.py`, which creates its own, and says when
    # queues that nobody uses are forgotten.
    f"{STOMP}shared/context.py": frozenset(("shared_groups", "store", "topics")),
    # Lists and forgets queues; only after the gate allowed to manage the broker.
    f"{STOMP}admin/control.py": frozenset(("shared_groups",)),
    # Learns the names of topics; the gate decides which of them a client reads.
    f"{STOMP}shared/new_topics.py": frozenset(("Topics",)),
    f"{STOMP}shared/temporary.py": frozenset(("Topics",)),
    # Opens the feeds that all gates follow, and says before which topics have names.
    f"{STOMP}shared/following.py": frozenset(("cursors", "rules")),
    # Asks whether a topic exists: whoever reads names in it need not be allowed to read all of it.
    f"{STOMP}outbound/sources.py": frozenset(("topics",)),
    # Forgets durable subscriptions, whose names begin with their user.
    f"{STOMP}inbound/subscriptions.py": frozenset(("shared_groups",)),
    # Keeps its own file in the store's directory, and words a refusal by whether there are rules at all.
    f"{REMOTING}nameserver/plugin.py": frozenset(("authorizers", "store")),
}


def modules() -> Iterator[Path]:
    for plugin in PLUGINS:
        for path in plugin.rglob("*.py"):
            # The client and its commands speak to a broker over a socket.
            if not {"client", "commands"}.intersection(path.relative_to(plugin).parts):
                yield path


def is_behind(name: str) -> bool:
    return name in BEHIND or name.startswith(PUBLISHING)


def is_broker(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") == "broker"


def is_private_of_gate(node: ast.Attribute) -> bool:
    """Whether *node* is what a gate, a grant or a feed keeps for itself."""
    return node.attr.startswith("_") and any(word in last_name(node.value) for word in ("gate", "grant", "feed"))


def is_open_of_feed(called: ast.expr) -> bool:
    """Whether *called* opens a cursor without a permit."""
    return isinstance(called, ast.Attribute) and called.attr == "open" and "feed" in last_name(called.value)


def last_name(node: ast.expr) -> str:
    """The last name of *node*, that of the function if it is a call."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each thing behind the gate that *source* touches."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private_of_gate(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and is_open_of_feed(node.func):
            yield node.lineno, "open"
        elif isinstance(node, ast.Attribute) and is_behind(node.attr) and is_broker(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "vars"):
            if any(is_broker(argument) for argument in node.args[:1]):
                yield node.lineno, node.func.id
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("martlet."):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in CLASSES)


def test_the_plugins_of_this_repository_are_looked_at() -> None:
    assert {path.name for path in PLUGINS} >= {"martlet_remoting", "martlet_line", "martlet_feed"}
    assert len(list(modules())) > 40


def test_no_protocol_reaches_around_the_gate() -> None:
    found: list[str] = []
    for path in modules():
        name = str(path.relative_to(ROOT))
        allowed = ALLOWED.get(name, frozenset())
        found += [f"{name}:{line} {what}" for line, what in reaches(path.read_text()) if what not in allowed]
    assert found == []


def test_what_is_allowed_is_used() -> None:
    for name, allowed in ALLOWED.items():
        assert allowed == {what for _, what in reaches((ROOT / name).read_text())}, name


@pytest.mark.parametrize(
    ("planted", "what"),
    [
        ("def handle(self):\n    self._broker.publish(message)", "publish"),
        ("broker.subscriptions.open(peer, 'secret', encoding)", "subscriptions"),
        ("join = context.state.broker.shared_groups.join", "shared_groups"),
        ("held = state.broker.store", "store"),
        ("broker.rules.authorizers = ()", "rules"),
        ("getattr(broker, 'store')", "getattr"),
        ("context.gate(command)._tables[0].delete_topic('t')", "_tables"),
        ("grant._store.lookup.record_at(0)", "_store"),
        ("self._gate._behind.publish(message)", "_behind"),
        ("shared.feed.open(wake, {'#': 0})", "open"),
        ("shared.feed._tail.add('#', self)", "_tail"),
        ("from martlet.sessions.sessions import Sessions", "Sessions"),
    ],
)
def test_a_planted_reach_around_the_gate_is_found(planted: str, what: str) -> None:
    assert [name for _, name in reaches(planted)] == [what]


@pytest.mark.parametrize(
    "fine",
    ["broker.gate(peer.identity).publish(message)", "broker.clock.now_ms()", "grant.store.readers.end_offset(queue)"],
)
def test_what_goes_through_the_gate_is_not(fine: str) -> None:
    assert list(reaches(fine)) == []
