"""Requests of administrators: SUBSCRIBE to ``/control/connections`` or ``/control/subscriptions``.

The answer is one or more MESSAGE frames, each with a JSON array of objects, and one with ``browser:end`` as the last
one, as that of a browser. Nothing follows, and there is no subscription to end. Requires the permission to manage the
broker.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.steps import Pace, Steps

from .browsing import last_frame
from .codec import encode_frame
from .context import Context
from .errors import StompError, shown
from .packets import Subscribe, Version

__all__ = ["PREFIX", "answer_request"]

PREFIX: Final = "/control/"
ROWS_A_MESSAGE: Final = 500

Row = dict[str, Any]


def answer_request(context: Context, gate: Gate, peer: Peer, request: Subscribe, version: Version) -> Steps[None]:
    """Answer *request*, in slices. Raises `StompError` and `Refused`."""
    gate.manage_broker()
    list_rows = _LISTS.get(request.destination)
    if list_rows is None:
        known = ", ".join(_LISTS)
        raise StompError(f"destination {shown(request.destination)} is unknown; there are {known}")
    rows: list[Row] = []
    pace = Pace()
    for row in list_rows(context):
        rows.append(row)
        if len(rows) >= ROWS_A_MESSAGE:
            peer.send(_frame(request, rows, version))
            rows = []
        if pace.is_over():
            yield
    if rows:
        peer.send(_frame(request, rows, version))
    peer.send(last_frame(request.id, 0, request.destination, version))


def _frame(request: Subscribe, rows: list[Row], version: Version) -> bytes:
    body = orjson.dumps(rows)
    headers = [("subscription", request.id)] if request.id is not None else []
    headers += [("message-id", "control"), ("destination", request.destination)]
    headers += [("content-type", "application/json"), ("content-length", str(len(body)))]
    return encode_frame("MESSAGE", headers, body, version)


def _connections(context: Context) -> Iterator[Row]:
    for handler in list(context.clients):
        yield handler.described()


def _subscriptions(context: Context) -> Iterator[Row]:
    for handler in list(context.clients):
        for row in handler.described_subscriptions():
            yield {"session": handler.session, **row}


_LISTS: Final[dict[str, Callable[[Context], Iterator[Row]]]] = {
    f"{PREFIX}connections": _connections,
    f"{PREFIX}subscriptions": _subscriptions,
}
