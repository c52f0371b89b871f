"""Acts on the frames of one client (martlet.contracts.Handler)."""

from collections.abc import Awaitable
from typing import Final, final

import trio

from martlet.contracts import Buffer, Password, Peer
from martlet.errors import Refused
from martlet.runtime.steps import Steps, begin
from martlet.state.journal import NEXT_COMMIT
from martlet_stomp.admin.control import PREFIX, answer_request
from martlet_stomp.session.client import Client
from martlet_stomp.session.logins import check_user_name, needs_password_check
from martlet_stomp.shared.context import Context
from martlet_stomp.wire.codec import encode_error, encode_receipts
from martlet_stomp.wire.connection import State, StompConnection
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import (
    Abort,
    AckRun,
    Begin,
    Commit,
    Connect,
    Disconnect,
    Event,
    Nack,
    SendRun,
    Subscribe,
    Unsubscribe,
)
from martlet_stomp.wire.scanner import LIST

__all__ = ["StompHandler"]

# Different headers in a run after which other clients have their turn.
HEADS_A_TURN: Final = 64
# Messages after which other clients have their turn, 2 us each: a read can have 6,500. 8 bytes of headers count as one.
MESSAGES_A_TURN: Final = 1024
# Messages that an acknowledgement counts as: it takes 2 to 4 us, and a read can have 16,000.
MESSAGES_AN_ACK: Final = 2
# Subscriptions to new topics in a turn, 150 us each. A selector can take 5 ms, so other clients have a turn after it.
SUBSCRIPTIONS_A_TURN: Final = 32
_RECEIPT: Final = b"RECEIPT\nreceipt-id:"


@final
class StompHandler:
    """Acts on the frames of one client."""

    __slots__ = ("_client", "_connection", "_context", "_peer", "_taken")

    def __init__(self, peer: Peer, connection: StompConnection, context: Context) -> None:
        self._peer = peer
        self._connection = connection
        self._context = context
        self._client: Client | None = None  # set once accepted
        self._taken = 0  # messages since other clients had their turn

    # events

    def handle(self, event: Event) -> Awaitable[None] | None:
        try:
            return self._take(event)
        except StompError:
            self._context.counters.errors += 1
            raise

    def _take(self, event: Event) -> Awaitable[None] | None:
        client, publishes = self._client, self._context.broker.round_publishes
        if publishes.parts and (client is None or _may_depend(event, client)):
            publishes.finish()
        if isinstance(event, Connect):
            return self._accept(event)
        if client is None:
            if isinstance(event, Disconnect):  # before the client was accepted
                self._disconnect(event)
            return None
        if isinstance(event, SendRun):
            if event.transaction is None:
                client.incoming.send_run(event)
            else:
                client.transactions.send(event, event.transaction)
            heads = set(event.headers)
            self._taken += len(event.headers) + sum([head.size for head in heads]) // 8
            self._taken += sum([head.destination.count(LIST) for head in heads])
            if len(heads) > HEADS_A_TURN:
                self._taken = MESSAGES_A_TURN + 1
        elif isinstance(event, AckRun):
            if event.transaction is None:
                client.acknowledgements.acknowledge(event)
            else:
                client.transactions.acknowledge(event, event.transaction)
            self._taken += MESSAGES_AN_ACK * len(event.offsets)
        else:
            return self._act(event, client)
        if self._taken <= MESSAGES_A_TURN:
            return None
        self._taken = 0
        return self._context.broker.turns.wait()

    def _act(
        self, event: Nack | Subscribe | Unsubscribe | Begin | Commit | Abort | Disconnect, client: Client
    ) -> Awaitable[None] | None:
        """Act on a rare frame. Raises `StompError`."""
        subscriptions, transactions = client.subscriptions, client.transactions
        rest: Steps[None] | None = None
        try:
            match event:
                case Subscribe() if event.destination.startswith(PREFIX):
                    context, version = self._context, self._connection.version
                    rest = begin(answer_request(context, client.gate, self._peer, event, version))
                case Subscribe():
                    steps = subscriptions.subscribe(event)
                    rest = begin(steps) if steps is not None else None
                case Unsubscribe():
                    rest = subscriptions.unsubscribe(event)
                case Nack(transaction=None):
                    client.acknowledgements.refuse(event)
                case Nack(transaction=str(name)):
                    transactions.refuse(event, name)
                    return None
                case Begin(name):
                    transactions.begin(name)
                case Commit(name):
                    transactions.commit(name)
                case Abort(name):
                    transactions.abort(name)
                case Disconnect():
                    self._disconnect(event)
                    return None
        except Refused as refused:
            raise StompError(str(refused), event.receipt) from refused
        except StompError as error:
            error.receipt = event.receipt
            raise
        if rest is not None:
            return self._finish(rest, event.receipt)
        if event.receipt is not None:
            self._answer(event.receipt)
        if isinstance(event, Subscribe) and (event.selector or len(subscriptions) % SUBSCRIPTIONS_A_TURN == 0):
            return self._context.broker.turns.wait()
        return None

    async def _finish(self, rest: Steps[None], receipt: bytes | None) -> None:
        try:
            await self._context.broker.turns.finish(rest)
        except Refused as refused:
            raise StompError(str(refused), receipt) from refused
        except StompError as error:
            error.receipt = receipt
            raise
        if receipt is not None:
            self._answer(receipt)

    def _answer(self, receipt: bytes) -> None:
        """Answer *receipt* once everything of this round is durable."""
        self._context.counters.receipts += 1
        self._peer.hold_until(NEXT_COMMIT)
        self._peer.send(encode_receipts((receipt,)))

    def _disconnect(self, event: Disconnect) -> None:
        if event.receipt is not None:
            self._answer(event.receipt)
        self._peer.close("")

    # CONNECT

    def _accept(self, connect: Connect) -> Awaitable[None] | None:
        """Accept the client, at once if nothing must be awaited. Raises `StompError`."""
        check_user_name(connect.login or "")
        if needs_password_check(self._context.broker.authentication, connect, self._peer.identity):
            return self._check_password(connect)
        try:
            self._peer.identity = self._context.broker.authentication.identify(self._peer)
        except Refused as refused:
            raise StompError(str(refused)) from refused
        self._open(connect)
        return None

    async def _check_password(self, connect: Connect) -> None:
        credentials = Password(connect.login or "", (connect.passcode or "").encode())
        try:
            authentication, origin = self._context.broker.authentication, self._peer.login_origin()
            self._peer.identity = await authentication.authenticate_password(credentials, origin)
        except Refused as refused:
            raise StompError(str(refused)) from refused
        self._open(connect)

    def _open(self, connect: Connect) -> None:
        if self._connection.state is not State.ACCEPTING:
            return  # the connection ended while a thread checked the passcode
        try:
            self._client = Client(self._peer, self._connection, self._context, connect, self._end)
        except Refused as refused:
            raise StompError(str(refused)) from refused
        self._client.greet()

    # the server's calls

    def refuse(self, answer: Buffer, refused: Refused) -> bytes | None:
        """Return ERROR for the first receipt of *answer*, whose commit failed; the connection closes."""
        data = bytes(answer)
        if not data.startswith(_RECEIPT):
            return None
        receipt = data[len(_RECEIPT) : data.index(b"\n", len(_RECEIPT))]
        error = encode_error(str(refused), self._connection.version, receipt)
        self._connection.end()
        self._peer.close(str(refused))
        return error

    def collect(self, budget_bytes: int) -> None:
        client = self._client
        if client is None:
            return
        counters = self._context.counters
        delivered = counters.delivered
        try:
            client.subscriptions.collect(budget_bytes)
        except (Refused, StompError) as error:
            self._end(str(error))
        if client.beat is not None and counters.delivered != delivered:  # what woke it may be for others
            client.beat.sent_at = trio.current_time()

    def _end(self, text: str) -> None:
        """Send ERROR with *text*, and close the connection."""
        self._context.counters.errors += 1
        self._peer.send(self._connection.farewell(StompError(text)))
        self._peer.close(text)

    def closed(self, reason: str) -> None:
        if self._client is not None:
            self._client.leave()
            self._client = None
        self._connection.end()


def _may_depend(event: Event, client: Client) -> bool:
    """Return whether *event* may depend on messages of this round that are not stored yet.

    An ACK does not, but its receipt comes after those of earlier frames.
    """
    if isinstance(event, SendRun):
        return event.transaction is not None
    return not isinstance(event, AckRun) or event.transaction is not None or client.incoming.waits
