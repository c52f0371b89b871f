"""The state of request handlers: `RemotingState`, shared by all connections, and a `RequestContext` per connection.

A request handler is a function ``(context, command) -> Answer``. It returns the frame of the answer, or None if it
sends the answer with `RequestContext.answer`, now or later (a held pull, a relayed request). A handler that may take
more than a few milliseconds is a generator: it yields at the end of each slice and returns the same. A handler that
waits, for the disk or for other tasks, is a coroutine. Further requests of the connection wait for generators and
coroutines. To refuse a request, a handler raises `Refused`, which `RemotingState.reason_codes` maps to a response code,
or `Declined` with a response code of its own. If a handler raises `NotReady` before it has changed any state, it is
called again after the rebuild. Handlers ignore the oneway bit: the caller drops the answer.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeAlias, TypeVar, final

import trio

from martlet.broker import Broker
from martlet.contracts import Peer, Timers, Transactions
from martlet.errors import MartletError, NotReady, Reason, Refused, StoreError, StoreFailed
from martlet.net.complaints import Complaints, Refusals
from martlet.runtime.steps import Steps
from martlet.tables.topics import Topic
from martlet_remoting.access.gates import ConnectionGates
from martlet_remoting.cluster.other_brokers import OtherBrokers
from martlet_remoting.cluster.registrar import Registrar
from martlet_remoting.config import RemotingConfig
from martlet_remoting.consumers.bulk_reads import BulkReads, PendingBulkReads
from martlet_remoting.consumers.cold_reads import ColdReads
from martlet_remoting.consumers.counters import RequestCounters
from martlet_remoting.consumers.long_poll import ParkedPulls, PendingPulls
from martlet_remoting.consumers.members import Members, QueueLocks
from martlet_remoting.consumers.pops import PendingPops, PopGroups
from martlet_remoting.consumers.pulled_groups import PulledGroups
from martlet_remoting.consumers.rates import Rates
from martlet_remoting.consumers.request_modes import RequestModes
from martlet_remoting.consumers.timeouts import Timeouts
from martlet_remoting.shared.round_sends import RoundSends
from martlet_remoting.shared.templates import Templates
from martlet_remoting.wire.codec import encode_command, encode_response, encode_response_in_pieces
from martlet_remoting.wire.codes import ANSWER_LANGUAGE, FLAG_ONEWAY, REQUEST_NAMES, ResponseCode
from martlet_remoting.wire.packets import NO_EXT, Command, Frame
from martlet_remoting.wire.sends import Send

__all__ = [
    "NOTHING_POPPED",
    "Answer",
    "Declined",
    "Handle",
    "RemotingState",
    "RequestContext",
    "in_own_slice",
    "refusal",
    "refuse",
    "reply",
    "reply_in_pieces",
    "supports_delays",
    "supports_transactions",
]

log = logging.getLogger("martlet.remoting")

H = TypeVar("H")  # the header of a request

# Waiting requests of one connection that are answered when its login ends, 5 us each; a client that has more learns of
# the end from the end of the connection.
REFUSED_MAX: Final = 256
# Java clients require these fields in every answer to a pop.
NOTHING_POPPED: Final[Mapping[str, object]] = {"popTime": 0, "invisibleTime": 0, "reviveQid": 0, "restNum": 0}

REASON_CODES: Final[Mapping[Reason, int]] = {
    Reason.BUSY: ResponseCode.SYSTEM_BUSY,
    # As RocketMQ 5 AuthenticationPipeline; see ACL_1_CODES.
    Reason.CREDENTIALS: ResponseCode.NO_PERMISSION,
    Reason.ENDED: ResponseCode.NO_PERMISSION,
    Reason.EXPIRED: ResponseCode.NO_PERMISSION,
    Reason.FENCED: ResponseCode.ILLEGAL_OPERATION,
    Reason.ILLEGAL: ResponseCode.MESSAGE_ILLEGAL,
    # As Java brokers, which read a missing field as null and fail later.
    Reason.MALFORMED: ResponseCode.SYSTEM_ERROR,
    Reason.NO_PERMISSION: ResponseCode.NO_PERMISSION,
    Reason.NO_TOPIC: ResponseCode.TOPIC_NOT_EXIST,
    Reason.NO_GROUP: ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
    Reason.NOT_FOUND: ResponseCode.QUERY_NOT_FOUND,
    Reason.NOT_SUPPORTED: ResponseCode.SYSTEM_ERROR,
    Reason.PARAMETER: ResponseCode.INVALID_PARAMETER,
    Reason.QUOTA: ResponseCode.SYSTEM_BUSY,
    Reason.UNAVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
}
# As RocketMQ up to 5.3.2 with ACL 1.0, where PlainAccessValidator raises an exception.
ACL_1_CODES: Final[Mapping[Reason, int]] = {
    Reason.CREDENTIALS: ResponseCode.SYSTEM_ERROR,
    Reason.ENDED: ResponseCode.SYSTEM_ERROR,
    Reason.EXPIRED: ResponseCode.SYSTEM_ERROR,
    Reason.NO_PERMISSION: ResponseCode.SYSTEM_ERROR,
}


# Refusals for these reasons are logged for the operator.
LIMITS: Final = frozenset((Reason.BUSY, Reason.QUOTA))


@final
class Declined(MartletError):
    """The request is refused with RocketMQ's *code*; *ext* are header fields of the answer."""

    def __init__(self, code: int, text: str, ext: Mapping[str, object] = NO_EXT) -> None:
        super().__init__(text)
        self.code = code
        self.ext = ext


def reply(command: Command, ext: Mapping[str, object] = NO_EXT, body: bytes = b"") -> bytes:
    """Return the frame that answers *command* with success."""
    return encode_response(command.opaque, ResponseCode.SUCCESS, ext, body)


def reply_in_pieces(command: Command, body: list[bytes], ext: Mapping[str, object] = NO_EXT) -> Frame:
    """Like `reply`, for a body that may be long."""
    return encode_response_in_pieces(command.opaque, ResponseCode.SUCCESS, ext, body)


def refuse(command: Command, code: int, remark: str, ext: Mapping[str, object] = NO_EXT) -> bytes:
    """Return the frame that answers *command* with *code* and the reason *remark*."""
    return encode_response(command.opaque, code, ext, remark=remark)


@final
class RemotingState:
    """State that all connections of the plugin share, one collaborator for each concern."""

    def __init__(self, broker: Broker, config: RemotingConfig, registrar: Registrar | None = None) -> None:
        self.broker: Final = broker
        self.config: Final = config
        codes = REASON_CODES if config.acl_errors == "2.0" else {**REASON_CODES, **ACL_1_CODES}
        self.templates: Final = Templates(
            broker.store.writer.store_host, broker.config.cluster, config.region, codes, trace=config.trace
        )
        self.sends: Final = RoundSends(broker.round_publishes, self.templates, config.unflushed_bytes_max)
        self.counters: Final = RequestCounters(broker.clock.now_ms(), broker.store.readable)
        self.complaints: Final = Complaints(log)
        self.timeouts: Final = Timeouts()
        self.members: Final = Members(broker.groups, config.groups_peer_max, config.subscribed_chars_peer_max)
        broker.draining.others.append(self.members.broadcasting_on)
        self.locks: Final = QueueLocks(config.lock_s, config.locks_peer_max, broker.topics.has_queue)
        self.parked: Final = ParkedPulls(broker.store, self.timeouts, config.parked_max)
        self.pops: Final = PopGroups(broker, self.timeouts, self.now, config.pops_waiting_max, config.pops_line_max)
        self.bulk_reads: Final = BulkReads(
            broker.store, self.timeouts, self.now, config.bulk_reads_max, config.bulk_reads_peer_max
        )
        self.rates: Final = Rates(
            broker.topics, broker.groups.__contains__, broker.store, self.now, broker.clock.now_ms
        )
        self.pulled_groups: Final = PulledGroups()
        self.cold: Final = ColdReads(self.now, broker.clock.now_ms, config.cold_tier_bytes_max)
        self.contexts: Final[dict[RequestContext, None]] = {}
        self.switches: Final = {"useServerSideResetOffset": True}  # by RocketMQ's names; clients can change them
        self.request_modes: Final = RequestModes(broker.topics, broker.groups, config.request_mode)
        self.registrar: Final = registrar
        # None if the broker registers with no name server.
        self.others: OtherBrokers | None = OtherBrokers(registrar) if registrar is not None else None
        broker.revocation.waiting += [
            self.parked.waiting_pulls,
            self.pops.waiting_pops,
            self.bulk_reads.waiting_reads,
        ]
        broker.revocation.logins += [self.parked.logins, self.pops.logins, self.bulk_reads.logins]
        broker.topics.changed.append(self._topic_changed)
        broker.groups.changed.append(self._group_changed)

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is None:  # a topic was deleted
            self.parked.wake_gone(self.broker.topics)
            self.bulk_reads.end_waits()

    def _group_changed(self, name: str) -> None:
        if self.broker.groups.get(name) is None:  # the group was deleted
            self.cold.limits.pop(name, None)

    def set_store_host(self, host: bytes) -> None:
        """Set the address of this broker that new records and message ids contain."""
        self.broker.store.writer.store_host = host
        self.templates.set_store_host(host)

    @staticmethod
    def now() -> float:
        """Return the time for timeouts and locks, in seconds."""
        return trio.current_time()

    def complain_of(self, peer: Peer, code: int, error: MartletError) -> None:
        """Log that an earlier request of *peer* was refused for a limit."""
        text = "refused request %s of the remoting client at %s; %s"
        self.complaints.warn(text, REQUEST_NAMES.get(code, code), peer.address, error)

    def statistics(self) -> dict[str, object]:
        counters = self.counters
        return {
            "connections": len(self.contexts),
            "requests": counters.requests,
            "messages_pulled": self.rates.found,
            "cold_reads_refused": self.cold.refused,
            "refused_by_code": {str(code): count for code, count in sorted(counters.refusals.items())},
            "parked_pulls": self.parked.waiting,
            "parked_pulls_given_up": self.parked.given_up,
            "bulk_reads": self.bulk_reads.count,
            **self.pops.statistics(),
            "locked_queues": len(self.locks),
            **self.members.statistics(),
        }


def supports_delays(broker: Broker) -> bool:
    """Return whether a plugin holds delayed messages; without one, sends of delayed messages are refused."""
    return broker.capability(Timers) is not None


def supports_transactions(broker: Broker) -> bool:
    """Return whether a plugin holds half messages; without one, sends of half messages are refused."""
    return broker.capability(Transactions) is not None


def refusal(state: RemotingState, command: Command, error: MartletError, ext: Mapping[str, object] = NO_EXT) -> bytes:
    """Return the frame that answers *command* with *error*; re-raise an error that must end the connection."""
    if isinstance(error, Refused):
        code = state.templates.reason_codes[error.reason]
    elif isinstance(error, Declined):
        code, ext = error.code, ext or error.ext
    elif isinstance(error, NotReady | StoreFailed):
        code = ResponseCode.SERVICE_NOT_AVAILABLE
    elif isinstance(error, StoreError):
        code = ResponseCode.SYSTEM_ERROR
    else:
        raise error
    state.counters.count_refusal(code)
    return refuse(command, code, str(error), ext)


@final
class _PendingRequest:
    """A request to the client that has no answer yet."""

    __slots__ = ("answered", "bucket", "context", "opaque")

    def __init__(self, context: "RequestContext", opaque: int, answered: Callable[[Command | None], None]) -> None:
        self.bucket = -1
        self.context = context
        self.opaque = opaque
        self.answered = answered

    def expire(self) -> None:
        self.context.finish(self.opaque, None)


@final
class RequestContext(ConnectionGates):
    """The state of one connection, for request handlers."""

    __slots__ = (
        "_asked",
        "_opaque",
        "_refusals",
        "bulk",
        "client_id",
        "fast",
        "pops",
        "pulls",
        "state",
    )

    def __init__(self, state: RemotingState, peer: Peer, *, fast: bool = False) -> None:
        super().__init__(state.broker, peer)
        self.state = state
        self.fast = fast  # a connection of the VIP port
        self.client_id = ""  # until the first heartbeat
        self.pulls = PendingPulls(peer, state.config.parked_peer_max, state.broker.store)
        self.pops = PendingPops(peer)
        self.bulk = PendingBulkReads(peer, state.bulk_reads)
        self._asked: dict[int, _PendingRequest] = {}
        self._opaque = 0
        self._refusals: Refusals | None = None  # made at the first refusal

    def __len__(self) -> int:
        """Return the number of waiting pulls, pops and bulk reads of this connection."""
        return len(self.pulls.held) + len(self.pops.held) + len(self.bulk.unfinished)

    def complain(self, code: int, error: MartletError) -> None:
        """Log that a request was refused for a limit: an operator does not see the client's answer."""
        # The reason is a limit, or the text names the setting.
        if not isinstance(error, Refused) or not (error.reason in LIMITS or "_max is " in str(error)):
            return
        if self._refusals is None:
            self._refusals = Refusals(self.state.complaints)
        name, address = self.client_id, self.peer.address
        who = f"the remoting client {name!r} at {address}" if name else f"the remoting client at {address}"
        self._refusals.warn(f"refused request {REQUEST_NAMES.get(code, code)}", who, str(error))

    def refused_send(self, send: Send, code: int, error: MartletError) -> bytes:
        """Return the refusal of *send*, a request *code*; empty if nobody waits for it. Re-raises as `refusal` does."""
        state = self.state
        *_, opaque, flag, _ = send
        self.complain(code, error)
        return b"" if flag else refusal(state, Command(code, opaque=opaque), error, state.templates.send_ext)

    def answer(self, command: Command, frame: Frame) -> None:
        """Send *frame* as the answer to *command*, after its handler returned None."""
        if not command.flag & FLAG_ONEWAY:
            self.push(frame)

    def send(self, frame: Frame) -> None:
        """Send *frame* while a request of this connection is being handled."""
        self.peer.send(*([frame] if isinstance(frame, bytes) else frame))

    def push(self, frame: Frame) -> None:
        """Send *frame* while no request of this connection is being handled, and wake the server to write it."""
        self.send(frame)
        self.peer.wake()

    def tell(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> None:
        """Send the client a oneway request."""
        self.push(self._request(code, ext, body, FLAG_ONEWAY))

    def ask(
        self, code: int, ext: Mapping[str, object], body: bytes, answered: Callable[[Command | None], None]
    ) -> None:
        """Send the client a request and call *answered* with the answer.

        *answered* is called with None if there is no answer within ``relay_timeout_ms`` or the connection closes.

        Raises:
          Refused: too many requests to this client are unanswered (BUSY).
        """
        config = self.state.config
        if len(self._asked) >= config.requests_peer_max:
            text = f"{len(self._asked)} requests to this client have no answer yet; remoting.requests_peer_max is"
            raise Refused(Reason.BUSY, f"{text} {config.requests_peer_max}")
        frame = self._request(code, ext, body, 0)
        asked = self._asked[self._opaque] = _PendingRequest(self, self._opaque, answered)
        self.state.timeouts.add(asked, self.state.now() + config.relay_timeout_ms / 1000)
        self.push(frame)

    def _request(self, code: int, ext: Mapping[str, object], body: bytes, flag: int) -> bytes:
        # The client numbers its own requests; only the response bit distinguishes them from ours.
        self._opaque = self._opaque % 0x7FFF_FFFF + 1
        return encode_command(Command(code, ext, body, self._opaque, flag, language=ANSWER_LANGUAGE))

    def finish(self, opaque: int, answer: Command | None) -> None:
        """Pass *answer* to the sender of the request *opaque*; ignore an answer without a waiting request."""
        asked = self._asked.pop(opaque, None)
        if asked is not None:
            self.state.timeouts.give_up(asked)
            asked.answered(answer)

    def refuse_waiting(self, refused: Refused) -> bytes:
        """End the requests that wait for messages.

        Returns the answers that refuse those of the connection's own identity, `REFUSED_MAX` at most. A client learns
        of the end of other requests from the end of the connection, which it may repeat over another one.
        """
        pulls = *self.pulls.held, *self.pulls.ready, *self.pulls.reading
        pops = *self.pops.held, *(pop for pop in self.pops.ready if pop not in self.pops.held)
        waiting = [(pull.opaque, pull.gate, NO_EXT) for pull in pulls]
        waiting += [(pop.opaque, pop.gate, NOTHING_POPPED) for pop in pops]
        waiting += [(read.opaque, read.gate, NO_EXT) for read in self.bulk.unfinished]
        own = [(opaque, ext) for opaque, gate, ext in waiting if gate.identity == self.peer.identity]
        answers = [refusal(self.state, Command(0, opaque=opaque), refused, ext) for opaque, ext in own[:REFUSED_MAX]]
        self._drop_waiting()
        return b"".join(answers)

    def _drop_waiting(self) -> None:
        self.state.parked.drop(self.pulls)
        self.state.pops.drop(self.pops)
        self.state.bulk_reads.drop(self.bulk)

    def closed(self) -> None:
        """Leave all groups, drop held pulls and pops, and fail requests to the client: the connection has closed."""
        self.state.contexts.pop(self, None)
        self.state.members.drop(self)
        self.state.locks.drop(self)
        self._drop_waiting()
        for opaque in list(self._asked):
            self.finish(opaque, None)


Answer: TypeAlias = Frame | Steps[Frame | None] | Awaitable[Frame | None] | None
Handle: TypeAlias = Callable[[RequestContext, Command], Answer]


def in_own_slice(
    handle: Callable[[RequestContext, Command, H], None], context: RequestContext, command: Command, header: H
) -> Steps[None]:
    """Run *handle* in a slice of its own: compiling a long filter expression takes milliseconds."""
    yield
    handle(context, command, header)
