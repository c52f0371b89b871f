"""The contracts between core and plugins: types only.

A protocol plugin provides a `Protocol`: where it listens, and how to make the two
halves of one peer. The `Connection` is a sans-I/O state machine (bytes to events;
time is an argument). The `Handler` acts on events; it is synchronous, so what it
does to the broker is atomic. The server owns the socket and gives the handler a
`Peer` to answer through.
"""

import ssl
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from typing import Protocol as TypingProtocol

from msgspec import Struct, field

from martlet.errors import Refused
from martlet.message import Message, Record
from martlet.records.layout import Buffer, Condition, Dispatcher, Find, Predicate, RecordView
from martlet.steps import Steps

__all__ = [
    "ANONYMOUS",
    "Authenticator",
    "Authorizer",
    "Buffer",
    "Certificate",
    "Challenge",
    "Command",
    "Compile",
    "Condition",
    "Connection",
    "Credentials",
    "Dispatcher",
    "Exchange",
    "ExternalCommit",
    "ExternalProducer",
    "ExternalRun",
    "ExternalStage",
    "ExternalTransaction",
    "ExternalTransactions",
    "Find",
    "HalfMessage",
    "Handler",
    "Identity",
    "Mechanism",
    "Password",
    "Peer",
    "PendingTimer",
    "PendingTransaction",
    "Predicate",
    "Producers",
    "Protocol",
    "Proved",
    "RecordView",
    "Router",
    "Service",
    "SignedRequest",
    "Stage",
    "StagedBatch",
    "Timers",
    "Traffic",
    "Transactions",
    "WebSocket",
]

# Makes a predicate over records of an expression; raises `Refused` (Reason.ILLEGAL), which says where the mistake is.
Compile: TypeAlias = Callable[[str], Predicate]
# A coroutine function that runs while the broker does, until it is cancelled. One with an argument `task_status` is
# waited for before the ports open: it calls `task_status.started()` when it is ready, as in `trio.Nursery.start`.
Service: TypeAlias = Callable[[], Awaitable[None]]


class Identity(Struct, frozen=True):
    """Who a client has proved to be; ``name`` is empty for an anonymous one."""

    name: str = ""


ANONYMOUS: Final = Identity()


class Stage(Struct, frozen=True):
    """A step of the path of messages, before they are stored; say which messages it wants, so that others stay fast.

    Args:
      change: called with a message that the stage wants; returns it, changed or not. May raise `Refused`.
      properties: the stage wants messages that have one of these properties, with a value.
      sys_flag: the stage also wants messages with one of these bits of sysFlag. A stage with neither wants every
        message; then the messages of a socket read are stored one by one.
    """

    change: Callable[[Message], Message]
    properties: tuple[str, ...] = ()
    sys_flag: int = 0


class Router(Struct, frozen=True):
    """Names the light queues that index a message as well; say which messages it wants, so that others stay fast.

    Args:
      names: called with a message that the router wants, after the stages; returns light topics, such as ``%LMQ%name``.
        May raise `Refused`.
      properties: the router wants messages that have one of these properties, with a value.
      sys_flag: the router also wants messages with one of these bits of sysFlag. A router with neither wants every
        message; then the messages of a socket read are stored one by one.
    """

    names: Callable[[Message], Iterable[str]]
    properties: tuple[str, ...] = ()
    sys_flag: int = 0


class PendingTimer(Struct, frozen=True):
    """A message that is held until it is due: what identifies it, and TIMER_OUT_MS for its recall handle."""

    due_ms: int
    topic: str
    queue_id: int
    unique: str
    out_ms: int
    store_ms: int
    body_bytes: int


class Timers(Struct, frozen=True):
    """A capability: delayed messages are held until they are due. Offer one with the stage that holds them.

    Attributes:
      recall: called with (topic, TIMER_OUT_MS, unique key, producer group) for a client that may publish to the topic;
        recalls the message, and returns the log position after which that is durable, 0 if no such message is held.
        Raises `Refused` (Reason.NOT_FOUND) if its time is over. None if messages cannot be recalled.
      count: called with times in ms since 1970; returns how many messages with a time are held that are due before each
        of them, and how many in all.
      pending: called with (time, number); returns at most so many messages that are due at this time or later, the
        first ones first.
      running: returns values for RocketMQ's GET_BROKER_RUNTIME_INFO, by their names there.
      levels: the delays of the levels, as in RocketMQ's messageDelayLevel.
    """

    recall: Callable[[str, int, str, str], Awaitable[int]] | None = None
    count: Callable[[Sequence[int]], Awaitable[list[int]]] | None = None
    pending: Callable[[int, int], Awaitable[list[PendingTimer]]] | None = None
    running: Callable[[], Mapping[str, str]] | None = None
    levels: str = ""


class HalfMessage(Struct, frozen=True, eq=False):
    """A message whose transaction has not ended, so that nobody receives it.

    Attributes:
      record: the half message as it is stored.
      topic: where its producer sent it, with ``queue_id``.
      group: the group of its producer.
    """

    record: Record
    topic: str
    queue_id: int
    group: str


class PendingTransaction(Struct, frozen=True, eq=False):
    """A half message, and how often producers were asked about it."""

    half: HalfMessage
    checks: int


class Transactions(ABC):
    """A capability: half messages are held until their transaction ends. Offer one with the stage that holds them.

    Protocols end transactions through `Gate.end_transaction`.
    """

    @abstractmethod
    def find_nowait(self, offset: int, position: int) -> HalfMessage | None:
        """Return the half message at *offset* of its queue and *position* of the log; None if `find` must look."""

    @abstractmethod
    async def find(self, position: int) -> HalfMessage:
        """Return the half message at *position* of the log, or the one that was parked there.

        Raises:
          Refused: none is there (Reason.NOT_FOUND).
        """

    @abstractmethod
    async def find_copy(self, position: int, key: str) -> HalfMessage | None:
        """Return the pending half message that replaced the one at *position*, whose unique key is *key*; None if none.

        Retention replaces those whose segments it removes; their producers still name the first one. Waits until a copy
        that was just made is readable.

        Raises:
          NotReady: the key index is being rebuilt.
          StoreFailed: the disk failed.
        """

    @abstractmethod
    def is_late(self, half: HalfMessage) -> bool:
        """Return whether the immunity that the message asked for is over: now only the answer to a check counts."""

    @abstractmethod
    def end(self, half: HalfMessage, *, commit: bool) -> int:
        """Commit the transaction of *half*, or roll it back; return the log position for `Peer.hold_until`.

        Raises:
          Refused: the transaction has ended (Reason.NOT_FOUND), or the message cannot be stored in its topic.
        """

    @abstractmethod
    def end_together(self, ends: Sequence[tuple[HalfMessage, bool]]) -> list[int]:
        """End several transactions, which costs much less than `end` for each; the flag says whether to commit.

        Returns the places of those that it left for `end`, which may refuse them.
        """

    @abstractmethod
    def resume(self, half: HalfMessage) -> int:
        """Check the transaction of *half*, pending or parked, again from the first time; return as `end` does.

        Raises:
          Refused: the transaction has ended (Reason.NOT_FOUND), or there are too many pending ones (Reason.BUSY).
        """

    @abstractmethod
    async def pending(self, offset: int, count: int, bytes_max: int) -> list[PendingTransaction]:
        """Return up to *count* pending transactions in order, from half message *offset* on."""


class StagedBatch(Struct, frozen=True, eq=False):
    """Messages for one queue of *topic*; queue -1 lets the broker choose it. Members are body, properties and flag."""

    topic: str
    queue_id: int
    members: Sequence[tuple[Buffer, bytes, int]]
    sys_flag: int = 0
    born_ms: int = 0
    born_host: bytes = bytes(8)
    reconsume_times: int = 0


class ExternalTransaction(Struct, frozen=True):
    """The name of an external transaction.

    Attributes:
      producer: the name of what is written, such as that of a Spark query.
      epoch: of the producer's run, from `ExternalTransactions.begin`; 0 if it never began one.
      sequence: the number of the transaction; each commit raises it.
      identity: who writes; a gate sets it, so that nobody can touch the transactions of another identity.
      content: a text of who writes that tells what is committed, such as a digest; it is kept with the last commit.
    """

    producer: str
    epoch: int
    sequence: int
    identity: str = ""
    content: str = ""


class ExternalRun(Struct, frozen=True):
    """A run of a producer.

    Attributes:
      epoch: the number of the run at this broker, from 1 on.
      committed: the last committed sequence, -1 if none.
      prepared: the sequence that an older run has prepared and not committed, -1 if none.
      brokers: the names of all brokers that runs of the producer have named.
      content: that of the last committed transaction, as its commit said.
    """

    epoch: int
    committed: int
    prepared: int = -1
    brokers: tuple[str, ...] = ()
    content: str = ""


class ExternalStage(Struct, frozen=True):
    """What is staged of a part: until the log position ``end`` is durable, ``chunks`` are only promised.

    If the sequence ``is_committed`` already, nothing was stored.
    """

    end: int
    chunks: int
    is_committed: bool


class ExternalCommit(Struct, frozen=True):
    """The last committed sequence, and how many messages this commit delivered: none if it ``is_duplicate``."""

    sequence: int
    messages: int
    is_duplicate: bool


class ExternalProducer(Struct, frozen=True):
    """A producer of external transactions, for lists.

    ``delivering`` and ``prepared`` are sequences, -1 for none. If it ``is_ended``, it is forgotten soon after its last
    commit; ``unused_hours`` count the operation of the broker since it was used.
    """

    identity: str
    name: str
    epoch: int
    run: str
    committed: int
    delivering: int
    parts: int
    messages: int
    bytes: int
    prepared: int = -1
    is_ended: bool = False
    unused_hours: int = 0


class ExternalTransactions(ABC):
    """A capability: transactions that somebody else coordinates, atomic over topics and queues of one broker.

    Messages are staged in parts, where nobody receives them, and a commit delivers all messages of some parts once.
    Parts consist of chunks, which are numbered from 0 on. Protocols use it through their gate, which
    sets the identity (`Gate.stage_external`).
    """

    @abstractmethod
    async def begin(
        self,
        identity: str,
        producer: str,
        run: str,
        began_ms: int = 0,
        brokers: Sequence[str] = (),
        *,
        only_known: bool = False,
    ) -> ExternalRun:
        """Begin a run of *producer*, or find it; earlier runs can no longer stage, prepare and commit.

        Args:
          began_ms: when the run began, by the clock of who runs it; one that began before the newest run is refused.
            0 if that is unknown: then the run that asks last counts as the newest.
          brokers: the names of brokers that the producer may write to; all that were ever named are remembered.
          only_known: begin nothing if the producer is unknown here; the epoch is then 0.

        Raises:
          Refused: a newer run took over (Reason.FENCED), or there are too many producers (Reason.BUSY).
        """

    @abstractmethod
    async def stage(self, transaction: ExternalTransaction, part: str, chunk: int, batch: StagedBatch) -> ExternalStage:
        """Stage *batch* as number *chunk* of *part*; a number that was staged before changes nothing.

        Raises:
          Refused: a newer run took over (Reason.FENCED), a chunk before this one or the run is unknown
            (Reason.NOT_FOUND), a limit is reached, or a message cannot be stored in its topic.
        """

    @abstractmethod
    async def prepare(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]],
        check: Callable[[str], object],
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        """Check that *parts* could be committed, and keep them for that, also when a newer run begins.

        For a transaction on several brokers: prepare it on all of them but one, commit it on this one, which decides
        it, and then on the others.

        Raises:
          Refused: as in `commit`.
        """

    @abstractmethod
    async def commit(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]] | None,
        check: Callable[[str], object],
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        """Deliver *parts*, names with their numbers of chunks, in this order; return when all of it is readable.

        A sequence that is committed already changes nothing.

        Args:
          parts: None for those that an older run has prepared as this sequence; changes nothing if there are none.
          check: called with each topic just before the decision; may raise `Refused`.
          is_last: the producer commits nothing more, and is forgotten soon.

        Raises:
          Refused: a newer run took over (Reason.FENCED), a part is incomplete or unknown (Reason.NOT_FOUND), or a topic
            is gone (Reason.NO_TOPIC); nothing is committed.
        """

    @abstractmethod
    async def abort(self, transaction: ExternalTransaction, parts: Sequence[str] | None = None) -> int:
        """Drop *parts* of a transaction, or all of it, unless it is committed or prepared; return how many."""

    @abstractmethod
    async def abort_prepared(self, transaction: ExternalTransaction) -> int:
        """Drop what an older run has prepared as this sequence; return how many parts."""

    @abstractmethod
    def producers(self, after: tuple[str, str], count: int) -> Steps[list[ExternalProducer]]:
        """Return up to *count* producers in the order of identity and name, those after identity and name *after*."""


class Producers(Struct, frozen=True):
    """A capability: asks connected producers about their transactions. Offer one with the protocol that they speak.

    Attributes:
      check_transaction: called with (group, half message as it is stored, topic and queue id that its producer sent it
        to); asks one live producer of the group whether it committed the transaction, each in turn. Returns False when
        none is connected. The answer is a request of the producer's own, which may never come.
    """

    check_transaction: Callable[[str, Record, str, int], bool]


class Password(Struct, frozen=True):
    """A user name and a password, as a client sent them."""

    user: str
    password: bytes

    def __repr__(self) -> str:
        return f"Password(user={self.user!r})"


class SignedRequest(Struct, frozen=True):
    """One request signed with a secret key, as RocketMQ's AclClientRPCHook does.

    ``signature`` is base64 of HMAC-SHA1 over ``content``: the values of all header fields but Signature in the order
    of their names, and the body.
    """

    access_key: str
    signature: str
    content: bytes
    token: str = ""

    def __repr__(self) -> str:
        return f"SignedRequest(access_key={self.access_key!r})"


class Certificate(Struct, frozen=True):
    """A client certificate that TLS has verified: its subject's common name, its DNS names, and its DER bytes."""

    common_name: str
    dns_names: tuple[str, ...]
    der: bytes

    def __repr__(self) -> str:
        return f"Certificate(common_name={self.common_name!r}, dns_names={self.dns_names!r})"


Credentials: TypeAlias = Password | SignedRequest | Certificate

# Returns who the credentials prove, None to leave them to the next one; raises `Refused` (Reason.CREDENTIALS) when
# they are wrong. Compare secrets in constant time (hmac.compare_digest), also for a user who does not exist.
# Called in a worker thread for a `Password`, on the event loop for the rest.
Authenticator: TypeAlias = Callable[[Credentials], Identity | None]


class Challenge(Struct, frozen=True):
    """A step of an `Exchange`: the client has to answer *data*."""

    data: bytes

    def __repr__(self) -> str:
        return "Challenge()"


class Proved(Struct, frozen=True):
    """The end of an `Exchange`: who the client is, and *data* for it, with which the broker may prove itself."""

    identity: Identity
    data: bytes = b""

    def __repr__(self) -> str:
        return f"Proved(identity={self.identity!r})"


# One authentication in several steps: called with the data that the client sent, in a worker thread and never twice at
# once. Raises `Refused` (Reason.CREDENTIALS) if the client proves nothing; it is not called again then.
Exchange: TypeAlias = Callable[[bytes], Challenge | Proved]
# Begins an exchange for one client.
Mechanism: TypeAlias = Callable[[], Exchange]
# Asked with (identity, action, topic name): True allows, False denies, None leaves it to the next one.
Authorizer: TypeAlias = Callable[[Identity, str, str], bool | None]


class Connection(TypingProtocol):
    """The protocol of one peer as a state machine, without I/O and without a clock."""

    @property
    def buffered_bytes(self) -> int:
        """How many received bytes belong to a request that is not complete yet."""
        ...

    def receive_data(self, data: bytes, now: float) -> None:
        """Take bytes from the socket. Raises `RemoteProtocolError` when the peer broke the protocol."""
        ...

    def events(self) -> Iterable[Any]:
        """Yield the events that are complete, each once."""
        ...

    def farewell(self, error: Exception) -> bytes:
        """Return the bytes that tell the peer about *error* before its connection closes; empty for none."""
        ...

    def deadline(self) -> float:
        """Return when to call `handle_timeout`, in seconds on the clock of *now*; infinity for never."""
        ...

    def handle_timeout(self, now: float) -> None:
        """Act on a deadline that has passed; may make events. Raises `RemoteProtocolError` to close the peer."""
        ...


class Peer(TypingProtocol):
    """The connection to one client, as its handler sees it."""

    address: str  # "127.0.0.1:53214"
    host: bytes  # 4 or 16 address bytes and an i32 port, as a record holds them
    identity: Identity  # who its certificate proves it to be, else anonymous; a protocol may set it after a login
    encrypted: bool  # whether the client has begun TLS

    def send(self, *pieces: Buffer) -> None:
        """Queue *pieces* for sending; everything queued while one socket read is handled leaves in one send."""
        ...

    def introduce(self, client: str, details: str = "") -> None:
        """Log that *client*, as its protocol names it, has connected, with *details* such as its version.

        From then on the log names it in lines about the connection, and says when and why that ends. Only the first
        call counts. The number of such lines per second is limited.
        """
        ...

    def hold_until(self, position: int) -> None:
        """Hold everything sent in this round until the log is flushed up to *position*.

        That is `Placed.end`, or `martlet.state.journal.NEXT_COMMIT` for all that this round appends.
        """
        ...

    def wake(self) -> None:
        """Ask for a call of `Handler.collect` once the socket has room; many wakes cause one call."""
        ...

    def wake_last(self) -> None:
        """Like `wake`, but after all peers that were woken by `wake`, and for one peer in each turn of the event loop.

        For deliveries of much data that nobody waits for, so that others hardly notice them.
        """
        ...

    def has_room(self) -> bool:
        """Return whether the client keeps up; if not, what is sent now only waits in memory.

        For data that may be dropped or sent later. Who delivers in `Handler.collect` need not ask.
        """
        ...

    def start_tls(self) -> None:
        """Begin TLS now, for protocols that upgrade: what was sent before leaves in plain text, the rest after it.

        Call it in `Handler.handle`, for a command such as ``STARTTLS``, or while the handler is made, for a server that
        speaks first. The next that the client sends must be a TLS handshake, else it is closed.

        Raises:
          Refused: the port has no certificate (Reason.NOT_SUPPORTED), or the connection uses TLS or WebSocket already.
        """
        ...

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run the coroutine function *work* in the background; it is cancelled when the peer disconnects.

        Raises:
          Refused: too many are running for this peer (Reason.BUSY).
        """
        ...

    def close(self, reason: str) -> None:
        """Close the connection once everything queued is sent; *reason* goes to the log, empty for an orderly end."""
        ...


class Handler(TypingProtocol):
    """Acts on the events of one peer."""

    def handle(self, event: Any) -> Awaitable[None] | None:
        """Act on *event* and answer through the peer. Raises `RemoteProtocolError` to close the peer.

        Work that would block the event loop for more than a few milliseconds is returned as an awaitable, usually
        from `martlet.turns.Turns.finish`. Later events of the peer wait until it is done, so their order is kept; it
        is cancelled if the peer disconnects. Events made by `Connection.handle_timeout` do not wait.
        """
        ...

    def refuse(self, answer: Buffer, refused: Refused) -> Buffer | None:
        """Return what replaces *answer*, the first piece sent after a `Peer.hold_until`.

        None drops all answers of this round and closes the peer, after `Connection.farewell` of *refused*.

        What it acknowledges was not stored: the disk became full. The answer has not left yet.
        """
        ...

    def collect(self, budget_bytes: int) -> None:
        """Send what is due, up to about *budget_bytes*; called after `Peer.wake`, once the socket has room."""
        ...

    def closed(self, reason: str) -> None:
        """Release what the peer held: it has disconnected."""
        ...


class WebSocket(Struct, frozen=True):
    """A protocol over WebSocket: the payloads of all frames form one stream of bytes.

    Args:
      subprotocols: a client that offers any must offer at least one of these, such as ``("mqtt",)``; one that offers
        none gets the protocol of the port.
      text: whether text frames are accepted as well as binary ones. Frames sent are always binary.
      origins: web pages that may connect, such as ``https://example.org``, or ``*`` for all; those of this machine and
        of the host that the client connects to (its header Host), and clients that send no Origin header, such as
        those that are no browsers, may always.
      origins_key: the configuration key of *origins*, for the reason of a refusal.
    """

    subprotocols: tuple[str, ...]
    text: bool = False
    origins: Collection[str] = ("*",)
    origins_key: str = ""


class Traffic(Struct, eq=False):
    """Bytes received from the peers of a port, and sent to them."""

    bytes_in: int = 0
    bytes_out: int = 0


class Protocol(Struct, frozen=True, eq=False):
    """A port, and how to serve each peer that connects to it.

    Args:
      name: the name in logs and in the ready line.
      listen: ``host:port``; port 0 means any free port.
      listen_at: if set, called for the address in place of *listen* once the protocols before this one are bound, for a
        port at a distance from another one.
      connect: creates the connection of a new peer; called with the time, on the clock of `Connection.receive_data`.
      handle: creates the handler of a new peer; called with the peer and its connection.
      tls: returns the TLS context, None for plain text; called for each new peer, so certificates can change.
      tls_required: whether plain text is refused. If not, a first byte of 0x16 means TLS (RocketMQ ``permissive``).
        What a handler sends before the first bytes of the client waits for them, on such a port and with *websocket*.
        If plain text is allowed, a client that sends nothing for 0.2 s gets it in plain text.
      bound: called with the address once the port is bound.
      websocket: if set, the port also accepts WebSocket clients, whose first byte is the G of ``GET``.
      optional: if the port cannot be bound, the broker logs a warning and starts without it.
      traffic: the server counts in it.
    """

    name: str
    listen: str  # "127.0.0.1:10911", port 0 for any free one
    connect: Callable[[float], Connection]  # (now)
    handle: Callable[[Peer, Any], Handler]  # (peer, its connection)
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    tls_required: bool = False
    bound: Callable[[str], None] = lambda address: None  # (address), once the port is bound
    optional: bool = False
    listen_at: Callable[[], str] | None = None
    websocket: WebSocket | None = None
    traffic: Traffic = field(default_factory=Traffic)


class Command(Struct, frozen=True):
    """A ``martlet`` subcommand: *configure* fills its argparse parser, *run* gets the arguments.

    *run* returns the exit code.
    """

    name: str
    help: str
    configure: Callable[[Any], None]  # gets the argparse parser
    run: Callable[[Any], int]
