"""An S3 server in a process of its own, and one in between that fails as networks and stores do."""

import http.client
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

__all__ = ["ENVIRON", "FAULTS", "Faulty", "faulty_server", "make_bucket", "s3_process"]

ENVIRON: Final = {"AWS_ACCESS_KEY_ID": "martlet-key-id", "AWS_SECRET_ACCESS_KEY": "martlet-secret-key"}
FAULTS: Final = ("lose request", "lose answer", "repeat", "refuse", "refuse after", "delay")
DELAY_S: Final = 0.02


@contextmanager
def s3_process() -> Iterator[str]:
    """Run an S3 server and yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found = None
    while found is None:
        line = process.stderr.readline()
        assert line, "the server has ended"
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
    reader = threading.Thread(target=process.stderr.read)  # or the pipe fills up
    reader.start()
    try:
        yield found[0]
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def make_bucket(endpoint: str, name: str) -> None:
    """Create the bucket *name*."""
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()


class Faulty(ThreadingHTTPServer):
    """Passes requests on to an S3 server; some of them badly, chosen by *seed*.

    Writes one at a time: the server looks whether an object exists, and then reads the new one, so of two large ones
    that come at the same time it would take both.

    Attributes:
      share: the part of the requests that fail.
      answer: a status and a body that every request gets instead, if it is not None.
      silent: requests get no answer, and their connections stay open.
      without: headers of requests that are not passed on.
      counts: how often each fault happened.
    """

    def __init__(self, target: str, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target.removeprefix("http://")
        self.share = 0.0
        self.answer: tuple[int, bytes] | None = None
        self.silent = False
        self.without: tuple[str, ...] = ()
        self.counts = dict.fromkeys(FAULTS, 0)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.writing = threading.Lock()
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def choose(self) -> str:
        """Return the fault of the next request, or an empty text."""
        with self._lock:
            if self._random.random() >= self.share:
                return ""
            fault = self._random.choice(FAULTS)
            self.counts[fault] += 1
            return fault

    def hang_up(self) -> None:
        """Close all connections, of which clients keep idle ones."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may close its connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faulty  # type: ignore[mutable-override]

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.choose()
        if self.server.silent:
            self.rfile.read(1)  # until somebody hangs up
            self.close_connection = True
        elif self.server.answer is not None:
            self._answer(*self.server.answer, {})
        elif fault == "lose request":
            self.close_connection = True
        elif fault == "refuse":
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>", {})
        else:
            self._pass_on(body, fault)

    def _pass_on(self, body: bytes, fault: str) -> None:
        if fault == "delay":
            time.sleep(DELAY_S)
        answer = self._ask(body)
        if fault == "repeat":
            answer = self._ask(body)
        if fault == "lose answer":
            self.close_connection = True
        elif fault == "refuse after":
            self._answer(503, b"<Error><Code>InternalError</Code></Error>", {})
        else:
            self._answer(*answer)

    def _ask(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in self.server.without}
        with self.server.writing if self.command == "PUT" else nullcontext():
            connection = http.client.HTTPConnection(self.server.target)
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
        kept = ("etag", "last-modified", "content-type", "content-range", "accept-ranges")
        found = {name: value for name, value in answer.headers.items() if name.lower() in kept}
        if self.command == "HEAD":
            found["Content-Length"] = answer.headers["Content-Length"] or "0"
        return answer.status, data, found

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve


@contextmanager
def faulty_server(target: str, seed: int = 1) -> Iterator[Faulty]:
    """Run a server that passes requests on to *target*."""
    server = Faulty(target, seed)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.hang_up()
        server.server_close()  # waits for all threads
