"""The generated pages of ``docs/``, from the real parsers, records and docstrings.

    python -m tools.manual cli > docs/cli.md
    python -m tools.manual config > docs/config.md
    python -m tools.manual client-api > docs/client-api.md
    python -m tools.manual plugin-api > docs/plugin-api.md

Tests compare these files with what this module generates, so they cannot go stale.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Final

from martlet.cli.config import as_markdown, sections
from martlet.cli.main import EPILOG, commands, make_parser
from martlet.plugins.loader import available
from tools.reference import Chapter, api_page

__all__ = [
    "CLIENT_CHAPTERS",
    "PAGES",
    "PLUGIN_CHAPTERS",
    "cli_page",
    "client_api_page",
    "config_page",
    "plugin_api_page",
]

CLI_HEAD = """\
# The command line

Generated from the parsers by `python -m tools.manual cli`. `martlet COMMAND --help` shows the same text.

`run`, `check`, `config`, `plugins` and `store` belong to the core. Plugins provide all others through the hook
`martlet_commands`: an installed plugin adds its commands.

"""

CONNECTION = "connection options"
SHARED = (CONNECTION, "directory options")
CONNECTION_HEAD = f"""
## {CONNECTION.capitalize()}

Commands that use RocketMQ's protocol ask a name server for the brokers' addresses and have these options;
`martlet mqtt` and `martlet stomp` connect to a port of one broker and list their own options below. The default of an
option comes from the environment, else from the section [`[client]`](config.md) of the configuration file, where each
option has a key of the same name. So one setting can be enough: `MARTLET_CONFIG=/etc/martlet.toml`.

"""

CONFIG_HEAD = """\
# Configuration

Generated from the configuration classes by `python -m tools.manual config`.

The configuration is a TOML file (`martlet run --config FILE`). Every key has a default, so a file is optional. The
command line can override each key: `--set store.flush=async`. `martlet config` prints a file with every key at its
default. `martlet check FILE` validates a file without starting a broker. An unknown key is an error that names the
most similar known key.

"""


CLIENT_API_HEAD = """\
# API of the Python client

Generated from the docstrings by `python -m tools.manual client-api`. [The Python client](client.md) explains
how to use it.

These are the classes for trio. `martlet_client.aio` has `Producer`, `PushConsumer`, `PullConsumer`,
`PopConsumer` and `Admin` with the same methods for asyncio. `martlet_client.blocking` has them for plain code:
no method is a coroutine there, and `with` and `for` replace `async with` and `async for`. All other names come from
`martlet_client`.

`async with` opens a client object and closes it at the end of the block. An object is opened once.

"""

PLUGIN_API_HEAD = """\
# API for plugins

Generated from the docstrings by `python -m tools.manual plugin-api`. [Writing a plugin](plugins.md) explains
how to use it, and [Hooks](hooks.md) says when each hook is called.

Anything that is not on this page may change without notice.

| you need | use |
|---|---|
| an empty plugin to begin with | `martlet plugins new NAME` |
| settings of your own | [`Settings`](#settings) and [`setting`](#setting), as the class attribute `config_class` |
| a port | [`Protocol`](#protocol), with a [`Connection`](#connection) and a [`Handler`](#handler) for each client |
| networks that may connect, and proxies | [`PortConfig`](#portconfig) and [`PortNetworks`](#portnetworks) |
| TLS, and the upgrade to it | [`Tls`](#tls-1) and [`TlsConfig`](#tlsconfig); [`Peer.start_tls`](#peerstart_tls) |
| to store messages of a client | [`Gate.publish`](#gatepublish), or [`Gate.publish_all`](#gatepublish_all) for many |
| an answer that leaves when a message is durable | [`Peer.hold_until`](#peerhold_until) with `Placed.end` |
| to change or refuse messages of every protocol | [`Stage`](#stage) |
| one message in several queues | [`Router`](#router) |
| a subscriber of whole topics, from any offset | [`Gate.subscribe`](#gatesubscribe) |
| a queue whose messages go to one consumer each | [`Gate.join`](#gatejoin) |
| such a queue that goes with its last consumer | the same, with `marks=`[`AUTO_DELETE`](#auto_delete) |
| topic filters with wildcards | a [`Feed`](#feed) and [`Gate.follow`](#gatefollow) |
| clients that come back to what they missed | [`Gate.open_session`](#gateopen_session) |
| the text of a message that RocketMQ's producer compressed | [`plain_body`](#plain_body) |
| to know who a client is | [`Authentication`](#authentication) asks each [`Authenticator`](#authenticator) |
| to decide what a client may do | [`Authorizer`](#authorizer) |
| state that survives a restart | [`Projection`](#projection), [`Journal`](#journal); [`Table`](#table) if it is small |
| work that takes longer than 10 ms | [`Turns`](#turns) with [`Steps`](#steps); [`off_loop`](#off_loop) for a thread |
| a task beside the clients | [`Service`](#service) |
| a subcommand of `martlet` | [`Subcommand`](#subcommand) |
| metrics in `martlet stats` | `broker.stats.add` |
| an identifier that nobody can guess | `broker.ids.unique` |
| tests without sockets | [`serving`](#serving) |

"""

CLIENT: Final = "martlet_client"
CLIENT_CHAPTERS: Final = (
    Chapter(
        "Sending",
        CLIENT,
        ("Producer", "Message", "SendResult", "SendStatus", "Reply", "Selector", "select_by_hash", "MessageQueue"),
    ),
    Chapter(
        "Sending in transactions",
        CLIENT,
        ("TransactionProducer", "TransactionState", "TransactionResult", "Execute", "Check"),
    ),
    Chapter(
        "Consuming",
        CLIENT,
        (
            "PushConsumer(): client_id assigned statistics subscribe unsubscribe",
            "Listener",
            "Outcome",
            "ReceivedMessage",
            "MessageModel",
            "ConsumeFrom",
            "Expression",
            "Sql",
        ),
    ),
    Chapter(
        "Sharing queues among members",
        CLIENT,
        (
            "Allocation",
            "Average",
            "AverageByCircle",
            "ByConfig",
            "ByMachineRoom",
            "ConsistentHash",
            "MachineRoomNearby",
        ),
    ),
    Chapter("Reading queues", CLIENT, ("PullConsumer", "Pulled", "PullStatus", "DamagedMessage")),
    Chapter("Popping messages", CLIENT, ("PopConsumer", "PoppedMessage")),
    Chapter(
        "Administration",
        CLIENT,
        (
            "Admin",
            "BrokerGroup",
            "ClusterInfo",
            "ConnectedMember",
            "QueueLag",
            "QueueStats",
            "TopicRoute",
            "TopicQueues",
        ),
    ),
    Chapter("Settings", CLIENT, ("ClientSettings", "SigningKey")),
    Chapter(
        "Errors",
        CLIENT,
        (
            "ClientError",
            "MessageRefused",
            "SendFailed",
            "Attempt",
            "BadAddress",
            "BrokerError",
            "RouteNotFound",
            "NameServerUnreachable",
            "NoReply",
            "ConnectionLost",
            "RequestTimeout",
            "BadAnswer",
            "MessageNotFound",
            "ClientClosed",
        ),
    ),
)

PLUGIN_CHAPTERS: Final = (
    Chapter("Hooks", "martlet.plugins.hooks", ("Hooks",)),
    Chapter(
        "What hooks return",
        "martlet.contracts",
        (
            "Protocol",
            "WebSocket",
            "PortNetworks",
            "Stage",
            "Router",
            "Dispatcher",
            "Compile",
            "Action",
            "Authorizer",
            "Decider",
            "Question",
            "Verdict",
            "AccessEvent",
            "LoginEvent",
            "Identity",
            "Service",
            "Subcommand",
            "Timers",
            "Transactions",
            "ExternalTransactions",
            "ExternalTransaction",
            "StagedBatch",
            "ExternalRun",
            "ExternalStage",
            "ExternalCommit",
            "ExternalProducer",
            "Producers",
            "Quota",
            "QuotaSource",
            "AccessControl",
            "AccessUser",
            "UserKey",
            "UserChange",
            "AccessRule",
            "AccessPolicy",
        ),
    ),
    Chapter("Peers of a protocol", "martlet.contracts", ("Connection", "Handler", "Peer", "Pace")),
    Chapter("Configuration", "martlet.config", ("Settings", "setting", "fill")),
    Chapter("Time", "martlet.runtime.clock", ("Clock",)),
    Chapter("Addresses", "martlet.net.addresses", ("split_address",)),
    Chapter("Ports", "martlet.net.ports", ("PortConfig",)),
    Chapter("TLS", "martlet.net.tls", ("Tls", "TlsConfig")),
    Chapter(
        "The broker",
        "martlet.broker",
        (
            "Broker: gate publish publish_all find_queue reserve journal capability selection filter_compiler "
            "call_when_saved end_clients",
        ),
    ),
    Chapter(
        "The gate",
        "martlet.access",
        (
            "Gate: publish publish_all find_queue note_unawaited give_back reply check_publish check_message "
            "find_topic subscribe follow may_follow join consume open_session shared_group allows check "
            "queries admin transactions external",
            "QueryGate: topic group broker keys record_at",
            "AdminGate: topic group topic_deletion group_deletion broker",
            "TransactionGate: end end_together force resume",
            "ExternalGate: begin stage prepare commit abort abort_prepared",
            "TopicOffsets: get has_used first_offset end_offset store_ms_at earliest_store_ms offset_by_time "
            "position_at readable bytes_since",
            "TopicGrant: entries groups committed",
            "TopicAdminGrant: update",
            "TopicDeletionGrant: delete",
            "GroupGrant: get ensure topics committed offset is_forbidden topic_offsets make_retry_topic "
            "make_dead_letter_topic",
            "GroupAdminGrant: update set_forbidden commit reset",
            "GroupDeletionGrant: delete",
            "ConsumeGrant: get_topic open_topic get_group group_policy ensure_group is_forbidden topic_offsets "
            "end_offset read offset commit pending_reset take_reset",
            "PublishGrant: get auto_create retry_group",
            "BrokerGrant: topics groups group forbidden offsets_in_steps statistics disk_usage earliest_store_ms",
            "BrokerAdminGrant: set_config set_auto_create clean delete_unused_topics",
            "Authentication: required changed authenticate find_signer count_wrong_signature identify "
            "authenticate_password begin proceed",
            "Signer: has_signed has_signed_in_slices",
            "Allowance: check_in charge_in check_out room charge_out must_wait check_subscriptions note_subscriptions "
            "join_group",
            "Rules: changed",
            "Replies: add",
        ),
    ),
    Chapter("What waits for messages", "martlet.access.revocation", ("Waiter",)),
    Chapter(
        "Credentials",
        "martlet.contracts",
        (
            "Authenticator",
            "LoginOrigin",
            "Password",
            "PasswordCheck",
            "AccessKey",
            "SigningSecret",
            "SignedRequest",
            "Certificate",
            "Nobody",
            "Credentials",
            "Mechanism",
            "Exchange",
            "Challenge",
            "Proved",
        ),
    ),
    Chapter("State computed from the log", "martlet.state.projection", ("Projection", "HoldsMessages", "NOTHING")),
    Chapter("Cold tiers", "martlet.store.cold_tier", ("ColdTier",)),
    Chapter("Reading cold tiers", "martlet.store.read.cold", ("ColdRecords: keep", "select_records")),
    Chapter("What a read returns", "martlet.store.read.reading", ("ReadOptions", "Care", "ReadResult", "ReadStatus")),
    Chapter("Threads for calls that may hang", "martlet.runtime.io_threads", ("IoThreads",)),
    Chapter("Snapshots of that state", "martlet.state", ("Pages", "pack_rows", "unpack_rows")),
    Chapter("Tables beside the log", "martlet.tables.saved", ("Table", "Tables: add")),
    Chapter("Journals", "martlet.state.journal", ("Journal: note", "read_notes", "NEXT_COMMIT")),
    Chapter("Turns of the event loop", "martlet.runtime.turns", ("Turns: finish",)),
    Chapter(
        "Long work",
        "martlet.runtime.steps",
        ("Steps", "WaitingSteps", "Wait", "Budget", "per_slice", "off_loop", "resume", "finish_now"),
    ),
    Chapter(
        "Messages",
        "martlet.message",
        (
            "Message",
            "Placed",
            "Record",
            "encode_properties",
            "decode_properties",
            "find_property",
            "put_property",
            "remove_property",
            "PROPERTIES_BYTES_MAX",
            "TAGS",
            "KEYS",
            "UNIQ_KEY",
        ),
    ),
    Chapter(
        "Stored records",
        "martlet.records.layout",
        ("RecordView", "Predicate", "Condition", "Find", "record_views", "Buffer"),
    ),
    Chapter("Whole records", "martlet.records.codec", ("decode_record",)),
    Chapter("Compressed bodies", "martlet.records.compression", ("plain_body", "CompressionError")),
    Chapter("Queues", "martlet.store", ("Queue: end_before",)),
    Chapter(
        "Topics",
        "martlet.tables.topics",
        (
            "Topics: get ensure update auto_create delete has_queue",
            "Topic: queue",
            "check_name",
            "is_reserved",
            "BROKER_TOPICS",
            "READ",
            "WRITE",
            "RESERVE_TIME",
            "RETRY_PREFIX",
            "DLQ_PREFIX",
        ),
    ),
    Chapter(
        "Subscriptions",
        "martlet.delivery.subscriptions",
        (
            "TopicSubscription: add_credit collect cursor close",
            "Delivery",
            "Start",
            "from_tail",
            "from_earliest",
            "from_offset",
        ),
    ),
    Chapter("Encodings", "martlet.delivery.fanout", ("Encoding", "parts")),
    Chapter(
        "Selections", "martlet.delivery.routing.selection", ("Selection", "EVERYTHING", "select_tags", "split_tags")
    ),
    Chapter("Topic filters", "martlet.delivery.routing.route_cache", ("RouteCache",)),
    Chapter(
        "Feeds",
        "martlet.delivery.feed",
        ("Cursors: open", "Feed: open tail_position has_removed hand_on close"),
    ),
    Chapter(
        "Cursors",
        "martlet.delivery.cursor",
        ("Cursor: position has_pending collect check add_filter remove_filter skip_to_tail close", "CursorPlace"),
    ),
    Chapter(
        "The tail of a topic",
        "martlet.delivery.tail_reader",
        ("Tails: of", "TailReader: attach detach"),
    ),
    Chapter("What an interest finds", "martlet.delivery.routing.division", ("Interest", "Route")),
    Chapter("Runs of messages", "martlet.delivery.runs", ("Run", "Frames", "Receiver")),
    Chapter("Memberships of shared groups", "martlet.groups.membership", ("Membership",)),
    Chapter("Rules of shared groups", "martlet.groups.strategy.policy", ("GroupPolicy", "OWNS_TOPIC", "AUTO_DELETE")),
    Chapter("Messages that stay with one member", "martlet.groups.strategy.sticky", ("Sticky",)),
    Chapter("Shared groups that nobody uses", "martlet.groups.unused_groups", ("UnusedGroups: expire since",)),
    Chapter("Shared groups that take some names", "martlet.groups.queues.finder", ("MessageSelection",)),
    Chapter("Shared groups", "martlet.groups.member", ("Member: add_credit collect ack nack extend touch leave",)),
    Chapter(
        "Messages of shared groups",
        "martlet.groups.group",
        ("SharedGroup: ack nack renew acknowledgement withdraw",),
    ),
    Chapter(
        "Sessions",
        "martlet.sessions.session",
        (
            "Session: name owner is_stored start position filters flight next_id data expiry_s until subscribe "
            "record_progress unsubscribe hand_out acknowledge hold changes move keep expire_after leave end",
            "JointChanges: acknowledge hold keep end apply store",
        ),
    ),
    Chapter(
        "All sessions",
        "martlet.sessions.sessions",
        ("Sessions: find is_settled wait_settled changes_without_client",),
    ),
    Chapter("Groups", "martlet.tables.groups", ("Groups: get ensure reader", "check_group_name")),
    Chapter("Committed offsets", "martlet.tables.offsets", ("CommittedOffsets: get commit",)),
    Chapter(
        "Errors",
        "martlet.errors",
        ("MartletError", "Refused", "Reason", "RemoteProtocolError", "LocalProtocolError", "ConfigError", "NotReady"),
    ),
    Chapter(
        "Testing",
        "martlet.testing.peers",
        ("serving", "Serving: connect", "MemoryPeer", "RecordingPeer", "check_connection"),
    ),
    Chapter("A disk for tests", "martlet.testing.disk", ("FakeDisk(): fail_next after_power_cut",)),
)


def own_plugins() -> list[str]:
    """Return the names of the plugins that Martlet's own distribution contains; the pages describe only these."""
    return [name for name, entry in available().items() if entry.distribution == "martlet"]


def config_page() -> str:
    """Return ``docs/config.md``."""
    return CONFIG_HEAD + as_markdown(list(sections(own_plugins())))


def cli_page() -> str:
    """Return ``docs/cli.md``."""
    blocks = [CLI_HEAD, "```\n", EPILOG, "```\n"]
    found = [(command.name, make_parser(command)) for command in commands(own_plugins())]
    shared = next(group for _, parser in found if (group := _connection_group(parser)))
    blocks += [CONNECTION_HEAD, _options_table(shared)]
    for name, parser in found:
        blocks += _chapter(f"martlet {name}", parser, "##", {CONNECTION})
    return "".join(blocks)


def client_api_page() -> str:
    """Return ``docs/client-api.md``."""
    return api_page(CLIENT_API_HEAD, CLIENT_CHAPTERS)


def plugin_api_page() -> str:
    """Return ``docs/plugin-api.md``."""
    return api_page(PLUGIN_API_HEAD, PLUGIN_CHAPTERS)


PAGES: Final = {
    "cli": cli_page,
    "config": config_page,
    "client-api": client_api_page,
    "plugin-api": plugin_api_page,
}


def _chapter(title: str, parser: argparse.ArgumentParser, level: str, told: set[str]) -> Iterator[str]:
    """The text on *parser*; *told* are the titles of the groups of options that have one already."""
    yield f"\n{level} `{title}`\n\n{parser.description or ''}\n"
    connection = _connection_group(parser)
    elsewhere = connection._group_actions if connection else []
    rows = [row for action in parser._actions if action not in elsewhere for row in _row(action)]
    if connection:
        name = connection.title or ""
        text = connection.description or "which broker, as whom, and TLS"
        rows.append(f"| [{name}](#{name.lower().replace(' ', '-')}) | {text} |")
    if rows:
        yield "\n" + "\n".join(["| argument | |", "|---|---|", *rows]) + "\n"
    if parser.epilog and level == "##":  # those of a subcommand are among them
        yield f"\n```\n{parser.epilog.strip()}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from _connection_chapter(action, level + "#", told)
            for name, inner in action.choices.items():
                yield from _chapter(f"{title} {name}", inner, level + "#", told)


def _connection_chapter(
    subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]", level: str, told: set[str]
) -> Iterator[str]:
    """The connection options of *subcommands*, once, if they differ from those at the head of the page."""
    found = {group.title: group for inner in subcommands.choices.values() if (group := _connection_group(inner))}
    for title, group in found.items():
        if title is not None and title not in told:
            told.add(title)
            yield f"\n{level} {title}\n\n{_options_table(group)}"


def _options_table(group: argparse._ArgumentGroup) -> str:
    rows = [row for action in group._group_actions for row in _row(action)]
    return "\n".join(["| option | |", "|---|---|", *rows]) + "\n"


def _connection_group(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup | None:
    """The options that many commands share, which the page describes once."""
    return next((group for group in parser._action_groups if (group.title or "").endswith(SHARED)), None)


def _row(action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
        return
    if isinstance(action.metavar, str):
        value = action.metavar
    elif action.choices:
        value = "|".join(map(str, action.choices))
    else:
        value = action.dest.upper() if action.option_strings else action.dest
    if action.option_strings:
        shown = ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")
    else:
        shown = value if action.nargs not in ("?", "*") else f"[{value}]"
    text = (action.help or "") % {"default": action.default}
    yield f"| `{shown}` | {text} |".replace("`" + shown + "`", "`" + shown.replace("|", "\\|") + "`")


def main(pages: list[str]) -> None:
    for page in pages:
        print(PAGES[page](), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
