"""A proxy between clients and a broker, which cuts connections within answers, or passes no answers on."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Proxy", "proxy"]

Address = tuple[str, int]


class Proxy:
    """Listens on *listen* and connects to *target*.

    Attributes:
      cuts: after how many bytes of answers each of the next connections is cut.
      piece_bytes: most bytes of answers to pass on at once.
      silent: pass no answers on.
    """

    def __init__(self, listen: Address, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(listen)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.cuts: list[int] = []
        self.piece_bytes = 1 << 16
        self.silent = False
        self.was_cut = 0
        self._accepting = self._run(self._accept)

    def cut(self, after: Sequence[int]) -> None:
        """Cut the connections that are open, and then one after the other after so many bytes of answers."""
        self.cuts = list(after)
        self._close_all()

    def close(self) -> None:
        """Close everything and wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()  # it may be opening the last connection
        self._close_all()
        for thread in self._threads:
            thread.join()

    def _close_all(self) -> None:
        while self._open:
            each = self._open.pop()
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _run(self, function: Callable[..., None], *words: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=words)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                budget = self.cuts.pop(0) if self.cuts else -1
                self._run(self._requests, client, server)
                self._run(self._answers, server, client, budget)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        _end(client, server)

    def _answers(self, server: socket.socket, client: socket.socket, budget: int) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(self.piece_bytes):
                if self.silent:
                    continue
                if 0 <= budget <= len(data):
                    client.sendall(data[:budget])
                    self.was_cut += 1
                    break
                budget -= len(data) if budget >= 0 else 0
                client.sendall(data)
        _end(client, server)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(listen: Address, target: Address) -> Iterator[Proxy]:
    """Run a proxy; close it at the end."""
    found = Proxy(listen, target)
    try:
        yield found
    finally:
        found.close()
