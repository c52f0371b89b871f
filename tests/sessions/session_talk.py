"""Shared by the tests of sessions: clients that can lose their session, and the stored state of a session."""

from dataclasses import dataclass, field
from typing import Any

import trio

from martlet.broker import Broker
from martlet.runtime.steps import finish_now
from martlet.sessions.journal_codec import SessionState
from martlet.sessions.session import Session


@dataclass
class Client:
    """Has a session; ``lost`` are the reasons why it lost one."""

    broker: Broker
    name: str = "client ä/1"
    owner: str = ""
    protocol: str = "toy"
    lost: list[str] = field(default_factory=list)

    def open(self, position: int = 0, expiry_s: int | None = 100) -> Session:
        session, _ = self.attach(position, expiry_s)
        return session

    def attach(self, position: int = 0, expiry_s: int | None = 100) -> tuple[Session, bool]:
        return self.broker.sessions.open(
            self.protocol, self.owner, self.name, position, self.lost.append, expiry_s=expiry_s
        )

    def stored(self) -> SessionState | None:
        return self.broker.sessions.table.get(f"{self.protocol} {self.name}")


def said(state: SessionState | Session | None) -> dict[str, Any]:
    """What a session says, as far as its protocol is concerned; empty where there is none."""
    if state is None:
        return {}
    names = ("owner", "position", "next_id", "data", "start")
    found = {name: getattr(state, name) for name in names}
    begins = {each: begin for each, begin in state.begins.items() if begin > state.position}
    return {**found, "filters": dict(state.filters), "begins": begins, "flight": dict(state.flight)}


async def durable(broker: Broker) -> None:
    """Commit, and wait until everything is durable and applied."""
    broker.store.committer.commit()
    await broker.store.flusher.flush()
    while not all(driven.order.at_end for driven in broker.projections._driven):
        await trio.lowlevel.checkpoint()


async def sweep(broker: Broker) -> None:
    """Look at all sessions once."""
    finish_now(broker.sessions.expiry.sweep())
    await durable(broker)
