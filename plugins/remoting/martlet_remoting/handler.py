"""What commands mean to the broker: answers to our questions, and requests, which go to their handlers.

Everything here is synchronous; pulls that wait and requests to clients are finished by
later commands, by the store's watchers and by `Deadlines`.
"""

from collections.abc import Mapping
from typing import Final, final

from martlet.contracts import Peer
from martlet.errors import Refused, StoreError, StoreFailed

from .codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from .connection import RemotingConnection
from .context import REASON_CODES, Context, Declined, Handle, Parts, refuse
from .handlers import admin, groups, offsets, pull, query, replies, send, sendback
from .packets import NO_EXT, Command

__all__ = ["FAST_TABLE", "TABLE", "RemotingHandler"]

TABLE: Final[dict[int, Handle]] = {
    **send.TABLE,
    **pull.TABLE,
    **offsets.TABLE,
    **groups.TABLE,
    **sendback.TABLE,
    **replies.TABLE,
    **query.TABLE,
    **admin.TABLE,
}
# The VIP port is for what must not wait behind pulls; clients never pull there.
FAST_TABLE: Final[dict[int, Handle]] = {
    code: handle
    for code, handle in TABLE.items()
    if code not in (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
}


@final
class RemotingHandler:
    """One connection's commands, in the order they came; answers may leave in another."""

    __slots__ = ("_table", "context")

    def __init__(self, parts: Parts, peer: Peer, connection: RemotingConnection, *, fast: bool = False) -> None:
        self.context = Context(parts, peer, fast=fast)
        self._table = FAST_TABLE if fast else TABLE
        connection.waiting = self.context.pulls.held
        parts.contexts.add(self.context)

    def handle(self, event: Command) -> None:
        """Answer a request, or take the client's answer to one of ours."""
        flag = event.flag
        context = self.context
        if flag & FLAG_RESPONSE:
            context.finish(event.opaque, event)
            return
        context.parts.requests += 1
        try:
            handle = self._table.get(event.code)
            if handle is None:
                raise Declined(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {event.code} not supported")
            answer = handle(context, event)
        except Refused as error:
            answer = self._refusal(event, REASON_CODES[error.reason], str(error))
        except Declined as error:
            answer = self._refusal(event, error.code, str(error), error.ext)
        except StoreFailed as error:
            answer = self._refusal(event, ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
        except StoreError as error:
            answer = self._refusal(event, ResponseCode.SYSTEM_ERROR, str(error))
        if answer is not None and not flag & FLAG_ONEWAY:
            context.peer.send(answer)

    def _refusal(self, command: Command, code: int, text: str, ext: Mapping[str, object] = NO_EXT) -> bytes:
        parts = self.context.parts
        parts.count_refusal(code)
        return refuse(command, code, text, parts.send_ext if command.code in send.TABLE else ext)

    def collect(self, budget_bytes: int) -> None:
        """Send what was waiting for room: answers to pulls."""
        if self.context.pulls.ready:
            pull.collect(self.context, budget_bytes)

    def closed(self, reason: str) -> None:
        """The connection is gone."""
        self.context.closed()
