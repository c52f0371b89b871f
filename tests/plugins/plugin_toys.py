"""Plugins for tests: some work, some fail, each in its own way."""

import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import trio
from tests.broker.toys import World

from martlet.broker import Broker
from martlet.config import Settings, fill, setting
from martlet.contracts import (
    Authenticator,
    Authorizer,
    Challenge,
    Compile,
    Credentials,
    Dispatcher,
    Exchange,
    Identity,
    LoginOrigin,
    Mechanism,
    Password,
    Predicate,
    Protocol,
    Proved,
    Quota,
    QuotaSource,
    RecordView,
    Router,
    Service,
    Stage,
    Subcommand,
)
from martlet.errors import ConfigError, Reason, Refused
from martlet.message import Message, put_property
from martlet.plugins import loader as plugins
from martlet.plugins.hooks import Hooks
from martlet.runtime.installed import EntryPoint
from martlet.runtime.steps import Steps
from martlet.state import NOTHING, Projection, pack_rows, unpack_rows
from martlet.store import ColdTier
from martlet.testing.cold import MemoryTier

# In which steps of a mechanism ran.
threads: list[threading.Thread] = []


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the toys discoverable, as if they were installed distributions."""
    values = {
        "full": "tests.plugins.plugin_toys:Full",
        "raising": "tests.plugins.plugin_toys:Raising",
        "calling": "tests.plugins.plugin_toys:Calling",
        "hanging": "tests.plugins.plugin_toys:Hanging",
        "guard": "tests.plugins.plugin_toys:Guard",
        "failing_guard": "tests.plugins.plugin_toys:FailingGuard",
        "stateful": "tests.plugins.plugin_toys:Stateful",
        "late": "tests.plugins.plugin_toys:Late",
        "two_states": "tests.plugins.plugin_toys:TwoStates",
        "misspelled": "tests.plugins.plugin_toys:Misspelled",
        "arguments": "tests.plugins.plugin_toys:OtherArguments",
        "no_plugin": "tests.plugins.plugin_toys:installed",
        "old_settings": "tests.plugins.plugin_toys:OldSettings",
        "gone": "tests.plugins.plugin_toys:NotThere",
        "needs_file": "tests.plugins.plugin_toys:NeedsFile",
    }
    entries = {name: EntryPoint(name, value, plugins.GROUP) for name, value in values.items()}
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "available", lambda: entries)
        patch.setattr("martlet.app.config.available", lambda: entries)
        yield


@dataclass(frozen=True)
class OldConfig:
    colour: str = "red"


class OldSettings(Hooks):
    config_class = OldConfig  # type: ignore[assignment]


class FullConfig(Settings):
    colour: str = setting("red", "what the stage stamps")


class Greeting:
    """A capability."""

    def __init__(self, text: str) -> None:
        self.text = text


def compile_longer(expression: str) -> Predicate:
    if not expression.isdigit():
        raise Refused(Reason.ILLEGAL, f"{expression!r} is no number")
    return lambda record: longer(record, int(expression))


def longer(record: RecordView, size: int) -> bool:
    return len(record.body) > size


class Bodies:
    """A projection: the bodies of topic t; fails at ``bad``."""

    name = "bodies"
    topics = frozenset(("t",))

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            if record.body == b"bad":
                raise ValueError("a bad body")
            self.seen.append(bytes(record.body))

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(1, self.seen.copy())

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self.seen = list(unpack_rows(1, data))
        yield

    def forget(self, topic: str) -> None:
        self.seen.clear()

    def floor(self) -> int:
        return NOTHING

    def roll(self, start: int, end: int) -> Steps[None]:
        yield from ()


class Full(Hooks):
    """Uses every hook."""

    config_class: ClassVar[type[Settings] | None] = FullConfig
    said: ClassVar[list[str]] = []
    bodies: ClassVar[Bodies]
    tier: ClassVar[MemoryTier | None] = None

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        self.said.append("protocols")
        return [World().protocol()]

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        colour = self.config.colour.encode()

        def stamp(message: Message) -> Message:
            message.properties = put_property(message.properties, b"COLOUR", colour)
            return message

        return [Stage(stamp)]

    def martlet_routers(self, broker: Broker) -> Sequence[Router]:
        def by_body(message: Message) -> list[str]:
            if message.topic != "routed":
                return []
            return [{b"a": "%LMQ%a", b"b": "%LMQ%b", b"bad": "bad"}[word] for word in message.body.split()]

        return [Router(by_body)]

    def martlet_filters(self, broker: Broker) -> Mapping[str, Compile]:
        return {"LONGER": compile_longer}

    def martlet_authenticators(self, broker: Broker) -> Sequence[Authenticator]:
        def check(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
            if isinstance(credentials, Password):
                return {"ada": Identity("ada")}[credentials.user]
            return None

        return [check]

    def martlet_mechanisms(self, broker: Broker) -> Mapping[str, Mechanism]:
        def begin() -> Exchange:
            said: list[bytes] = []

            def proceed(data: bytes) -> Challenge | Proved:
                said.append(data)
                if len(said) == 1:
                    return Challenge(b"who, " + data)
                if data == b"wrong":
                    raise Refused(Reason.CREDENTIALS, "wrong")
                if data == b"nothing":
                    return None  # type: ignore[return-value]
                threads.append(threading.current_thread())
                return Proved(Identity(data.decode()), b"welcome")

            return proceed

        return {"TWO-STEPS": begin}

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        def opinion(identity: Identity, action: str, topic: str) -> bool | None:
            if topic == "zero":
                raise ZeroDivisionError
            return False if topic == "secret" else None

        return [opinion]

    def martlet_quotas(self, broker: Broker) -> Sequence[QuotaSource]:
        def answer(identity: Identity) -> Sequence[Quota]:
            match identity.name:
                case "zero":
                    raise ZeroDivisionError
                case "wrong":
                    return [None]  # type: ignore[list-item]
                case "twice":
                    return [Quota("g"), Quota("g")]
            return [Quota(connections=1)] if identity.name == "ada" else []

        return [answer]

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Greeting: Greeting("hello")}

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        Full.bodies = Bodies()
        return (Full.bodies,)

    def martlet_cold_tiers(self, broker: Broker) -> Sequence[ColdTier]:
        Full.tier = Full.tier or MemoryTier(broker.store)
        Full.tier.move(broker.store)
        return [Full.tier]

    def martlet_dispatchers(self) -> Mapping[str, Dispatcher]:
        return {"lengths": lambda properties, store_ms: len(properties), "broken": lambda properties, store_ms: 1 << 70}

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        async def serve() -> None:
            self.said.append("serving")
            await trio.sleep_forever()

        return [serve]

    def martlet_commands(self) -> Sequence[Subcommand]:
        def configure(parser: ArgumentParser) -> None:
            parser.add_argument("--loud", action="store_true")

        def run(options: Namespace) -> int:
            self.said.append("LOUD" if options.loud else "quiet")
            return 7

        return [Subcommand("toy", "says something", configure, run)]

    def martlet_reload(self) -> None:
        self.said.append("reloaded")

    def martlet_stopping(self) -> None:
        self.said.append("stopping")


class Raising(Hooks):
    """Fails after it has given a stage."""

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        def spoil(message: Message) -> Message:
            raise AssertionError("the stage of a plugin that was left out was called")

        return [Stage(spoil)]

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        raise ValueError("no port today")


class Calling(Hooks):
    """Makes a mistake that shows inside of a library, in its constructor."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        fill(Strict, {}, "calling")


class Strict(Settings):
    """Has a key whose annotation cannot be resolved."""

    value: "no_such_type" = setting(1, "wrong")  # type: ignore[name-defined]  # noqa: F821


class Hanging(Hooks):
    """Never returns from its hook, until a test lets it."""

    entered: ClassVar[threading.Event] = threading.Event()
    let_go: ClassVar[threading.Event] = threading.Event()

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        self.entered.set()
        self.let_go.wait()
        return ()


class Guard(Hooks):
    """Denies everything."""

    def martlet_authorizers(self, broker: Broker) -> Sequence[Authorizer]:
        return [lambda identity, action, topic: False]


class FailingGuard(Guard):
    """Guards access, and fails in another hook."""

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        raise RuntimeError("no table of users")


class Stateful(Hooks):
    """Gives a projection, and a port and a capability that need it."""

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (Bodies(),)

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        return [World().protocol()]

    def martlet_quotas(self, broker: Broker) -> Sequence[QuotaSource]:
        def answer(identity: Identity) -> Sequence[Quota]:
            match identity.name:
                case "zero":
                    raise ZeroDivisionError
                case "wrong":
                    return [None]  # type: ignore[list-item]
                case "twice":
                    return [Quota("g"), Quota("g")]
            return [Quota(connections=1)] if identity.name == "ada" else []

        return [answer]

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Greeting: Greeting("hello")}

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        async def serve() -> None:
            try:
                await trio.sleep_forever()
            finally:
                Full.said.append("served")

        return [serve]


class Counted(Bodies):
    """As `Bodies`, under another name; also fails to forget."""

    name = "counted"

    def forget(self, topic: str) -> None:
        raise ValueError(f"topic {topic} is unforgettable")


class TwoStates(Hooks):
    """Gives two projections that fail at the same record."""

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (Bodies(), Counted())


class Late(Hooks):
    """Runs after the others, and overwrites their stamps."""

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        def stamp(message: Message) -> Message:
            message.properties = put_property(message.properties, b"LATE", message.properties.split(b"\x02")[0])
            return message

        return [Stage(stamp)]


class NeedsFile(Hooks):
    """Cannot be created without a configuration."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        raise ConfigError("config key 'needs_file.path' names no file")


class Misspelled(Hooks):
    def martlet_stage(self, broker: Broker) -> Sequence[Stage]:
        return ()


class OtherArguments(Hooks):
    def martlet_stages(self, broker: Broker, more: Any) -> Sequence[Stage]:  # type: ignore[override]
        return ()
