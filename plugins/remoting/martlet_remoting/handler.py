"""Dispatches the commands of a connection: requests to their handlers, answers to the broker's own requests.

Nearly all requests are handled immediately. A handler that takes more than a few milliseconds is a generator and
continues in slices (`martlet.runtime.steps`). Waiting pulls and requests to clients finish later: by other commands, by
the store's watchers and by `Timeouts`.
"""

from collections.abc import Awaitable, Generator
from typing import Final, final

import trio

from martlet.access import Gate
from martlet.access.signers import SLICE_BYTES
from martlet.contracts import Buffer, Peer
from martlet.errors import MartletError, NotReady, Refused
from martlet.runtime.steps import resume
from martlet_remoting.access.signers import Signers
from martlet_remoting.handlers import (
    acks,
    admin,
    assignments,
    bulk,
    external,
    groups,
    offsets,
    pops,
    pull,
    query,
    recalls,
    replies,
    send,
    sendback,
    transactions,
)
from martlet_remoting.handlers.context import Answer, Declined, Handle, RemotingState, RequestContext, refusal
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import NO_EXT, Command, Frame
from martlet_remoting.wire.runs import AckRun, SendRun
from martlet_remoting.wire.signatures import is_signed
from martlet_remoting.wire.unsupported import unsupported_text

__all__ = ["FAST_TABLE", "TABLE", "RemotingHandler"]

TABLE: Final[dict[int, Handle]] = {
    **send.TABLE,
    **recalls.TABLE,
    **pull.TABLE,
    **bulk.TABLE,
    **pops.TABLE,
    **acks.TABLE,
    **offsets.TABLE,
    **groups.TABLE,
    **assignments.TABLE,
    **sendback.TABLE,
    **transactions.TABLE,
    **external.TABLE,
    **replies.TABLE,
    **query.TABLE,
    **admin.TABLE,
}
# The VIP port is for requests that must not wait behind pulls; clients never pull there.
WAITING: Final = frozenset((*pull.TABLE.values(), *pops.TABLE.values(), *bulk.TABLE.values()))
FAST_TABLE: Final[dict[int, Handle]] = {code: handle for code, handle in TABLE.items() if handle not in WAITING}
# Read-only requests that may take long: further requests of the connection are handled in the meantime.
BESIDE: Final = frozenset(
    (
        RequestCode.GET_BROKER_CONSUME_STATS,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.QUERY_ASSIGNMENT,
        RequestCode.QUERY_CONSUME_TIME_SPAN,
        RequestCode.QUERY_MESSAGE,
    )
)

# The time for which a request waits for a rebuild: longer than most rebuilds, shorter than clients' timeouts.
READY_WAIT_S: Final = 5.0
# The types of a frame and of a run, as constants: `isinstance(frame, bytes | list)` would make the union at each call.
FRAMES: Final = (bytes, list)
RUNS: Final = (SendRun, AckRun)
# Requests in runs after which other connections have their turn: a request takes 4 to 12 us, and one read can have
# 2,000. With this limit a turn of the event loop takes 3 to 6 ms.
REQUESTS_A_TURN: Final = 512


@final
class RemotingHandler:
    """Handles the commands of one connection in order; answers may be sent in another order."""

    __slots__ = ("_signers", "_table", "_taken", "context")

    def __init__(self, state: RemotingState, peer: Peer, connection: RemotingConnection, *, fast: bool = False) -> None:
        self.context = RequestContext(state, peer, fast=fast)
        # None without authenticators: then signatures are not looked at.
        self._signers = Signers(state.broker, self.context) if state.broker.authentication.authenticators else None
        self._table = FAST_TABLE if fast else TABLE
        self._taken = 0  # requests in runs since other connections had their turn
        connection.waiting = self.context
        connection.refuse_waiting = self.context.refuse_waiting
        connection.takes_runs = True
        connection.signers = self._signers
        state.contexts[self.context] = None

    def handle(self, event: Command | SendRun | AckRun) -> Awaitable[None] | None:
        """Handle a request, or an answer to the broker's own; return an awaitable that finishes a long request."""
        context = self.context
        publishes = context.state.broker.round_publishes
        if publishes.parts and not isinstance(event, SendRun):
            publishes.finish()
        if isinstance(event, RUNS):
            signer = event.signer
            if signer is None:
                gate = context.own_gate or context.gate_of_run(None)
            else:
                gate = context.gate_of_run(signer.identity)
            if gate is None:
                return None  # nothing is taken, so each request comes and is refused by itself
            if isinstance(event, AckRun):
                event.taken = acks.ack_run(context, gate, event.acks)
                return self._give_turn_after(len(event))
            if event.sends:
                event.taken = send.send_run(context, gate, event.sends)
                context.state.counters.requests += event.taken
            if event.ends:
                publishes.finish()
                self._end_run(event, gate)
            return self._give_turn_after(event.size)
        flag, signers = event.flag, self._signers
        if flag & FLAG_RESPONSE:
            context.finish(event.opaque, event)
            return None
        if signers is not None and (event.identity is not None or not is_signed(event)):
            signers = None  # nothing to verify
        if signers is not None and len(event.body) > SLICE_BYTES:
            return self._handle_long(event, signers)
        context.state.counters.requests += 1
        try:
            if signers is not None:
                event.identity = signers.authenticate(event)
            handle = self._table.get(event.code)
            if handle is None:
                raise Declined(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, unsupported_text(event.code))
            answer = handle(context, event)
            if answer is not None and not isinstance(answer, FRAMES):
                return self._begin(event, answer)
        except NotReady as error:
            return self._finish(event, error)
        except MartletError as error:
            answer = self._refusal(event, error)
        if answer is not None and not flag & FLAG_ONEWAY:
            if type(answer) is bytes:
                context.peer.send(answer)
            else:
                context.send(answer)
        return None

    async def _handle_long(self, command: Command, signers: Signers) -> None:
        """Handle a signed request with a long body, whose signature takes several slices."""
        context = self.context
        try:
            command.identity = await context.state.broker.turns.finish(signers.authenticate_in_slices(command))
        except MartletError as error:
            context.state.counters.requests += 1
            context.answer(command, self._refusal(command, error))
            return
        rest = self.handle(command)
        context.peer.wake()
        if rest is not None:
            await rest

    def _give_turn_after(self, requests: int) -> Awaitable[None] | None:
        """Count *requests* in a run; after very many, return an awaitable that waits for this connection's turn."""
        self._taken += requests
        if self._taken < REQUESTS_A_TURN:
            return None
        self._taken = 0
        return self.context.state.broker.turns.wait()

    def _end_run(self, run: SendRun, gate: Gate) -> None:
        """End transactions together, then unusual ones one by one; no client waits for the answers."""
        for command in transactions.end_run(self.context, gate, [head for head, _ in run.taken_ends()]):
            if run.signer is not None:
                command.identity = run.signer.identity
            finish = self.handle(command)
            if finish is not None:
                self.context.peer.start(self._finish_beside, finish)

    @staticmethod
    async def _finish_beside(work: Awaitable[None]) -> None:
        await work

    def _begin(self, command: Command, answer: Answer) -> Awaitable[None] | None:
        """Run the first slice, which completes most requests; return an awaitable that runs the rest."""
        rest: Answer | NotReady = answer
        if isinstance(answer, Generator):
            try:
                rest = resume(next(answer), answer)
            except StopIteration as done:
                if done.value is not None and not command.flag & FLAG_ONEWAY:
                    self.context.send(done.value)
                return None
            except NotReady as error:
                rest = error
        if command.code in BESIDE:
            self.context.peer.start(self._finish, command, rest)
            return None
        return self._finish(command, rest)

    async def _finish(self, command: Command, answer: Answer | NotReady) -> None:
        """Finish and answer *command*; if its handler needs a rebuild, handle *command* again after the rebuild."""
        try:
            try:
                frame = await self._frame(answer)
            except NotReady as error:
                frame = await self._retry(command, error)
        except MartletError as error:
            frame = self._refusal(command, error)
        if frame is not None:
            self.context.answer(command, frame)

    async def _frame(self, answer: Answer | NotReady) -> Frame | None:
        if isinstance(answer, NotReady):
            raise answer
        if isinstance(answer, Generator):
            return await self.context.state.broker.turns.finish(answer)
        return answer if answer is None or isinstance(answer, FRAMES) else await answer

    async def _retry(self, command: Command, error: NotReady) -> Frame | None:
        """Handle *command* again after the rebuild; raise *error* if the rebuild takes too long."""
        deadline = trio.current_time() + READY_WAIT_S
        while True:
            with trio.move_on_at(deadline) as waiting:
                await error.wait()
            if waiting.cancelled_caught:
                raise error
            try:
                return await self._frame(self._table[command.code](self.context, command))
            except NotReady as again:
                error = again

    def _refusal(self, command: Command, error: MartletError) -> bytes:
        state = self.context.state
        self.context.complain(command.code, error)
        return refusal(state, command, error, state.templates.send_ext if command.code in send.TABLE else NO_EXT)

    def refuse(self, answer: Buffer, refused: Refused) -> bytes:
        """Return refusals that replace *answer*, the answers to requests whose messages could not be stored."""
        frames, state = FrameBuffer(), self.context.state
        frames.receive_data(bytes(answer))
        return b"".join(
            refusal(state, said, refused, state.templates.send_ext if "MSG_REGION" in said.ext else NO_EXT)
            for said in frames.commands()
        )

    def collect(self, budget_bytes: int) -> None:
        """Send answers to pulls, pops and bulk reads, up to *budget_bytes* of each."""
        if self.context.pulls.ready:
            pull.collect(self.context, budget_bytes)
        if self.context.pops.ready:
            pops.collect(self.context, budget_bytes)
        if self.context.bulk.ready:
            bulk.collect(self.context, budget_bytes)

    def closed(self, reason: str) -> None:
        """Clean up after the connection has closed."""
        self.context.closed()
