"""The clients and loads of `mqtt.py`: connections of MQTT 3.1.1 that count fixed-size frames and never parse one."""

import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from idle import resident_kib
from sockets import BLOCK_BYTES, Connection

WARM_S = 0.5
STEADY_RATE = 2000
AT_ONCE = 100  # clients that connect at the same time


class Target(NamedTuple):
    """A running broker."""

    port: int
    pid: int


Load: TypeAlias = Callable[[Target, float], tuple[float, ...]]  # takes seconds; returns its figures


def packet(first: int, content: bytes) -> bytes:
    size, length = len(content), bytearray()
    while True:
        size, digit = size >> 7, size & 127
        length.append(digit | (0x80 if size else 0))
        if not size:
            return bytes((first,)) + bytes(length) + content


def text(value: str) -> bytes:
    return len(value.encode()).to_bytes(2) + value.encode()


def hello(name: str, keep_alive_s: int = 0) -> bytes:
    """Return CONNECT with a clean session."""
    return packet(0x10, text("MQTT") + b"\x04\x02" + keep_alive_s.to_bytes(2) + text(name))


def frame(topic: str, payload_bytes: int, qos: int) -> tuple[bytes, bytes]:
    """Return what is before and after the identifier of a PUBLISH packet."""
    whole = packet(0x30 | qos << 1, text(topic) + (b"\0\0" if qos else b"") + bytes(payload_bytes))
    cut = len(whole) - payload_bytes - (2 if qos else 0)
    return whole[:cut], whole[cut + (2 if qos else 0) :]


class Client(Connection):
    """A connection that was accepted."""

    def __init__(self, port: int, name: str, keep_alive_s: int = 0) -> None:
        super().__init__(port)
        self.socket.sendall(hello(name, keep_alive_s))
        self.exactly(4)
        self.rest = b""

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            assert more, "the broker closed the connection"
            data += more
        return data

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self.socket.sendall(packet(0x82, b"\x00\x01" + text(topic_filter) + bytes((qos,))))
        self.exactly(5)

    def take(self) -> None:
        """Handle what has come."""


def answers(first: int, ids: tuple[bytes, bytes]) -> bytes:
    """Acknowledgements with the identifiers whose upper and lower bytes are given."""
    high, low = ids
    found = bytearray(4 * len(high))
    found[0::4] = bytes((first,)) * len(high)
    found[1::4] = b"\x02" * len(high)
    found[2::4], found[3::4] = high, low
    return bytes(found)


class Subscriber(Client):
    """Counts the messages that it gets, and acknowledges them."""

    def __init__(self, port: int, name: str, topic_filter: str, qos: int, frame_bytes: int, id_at: int) -> None:
        super().__init__(port, name)
        self.subscribe(topic_filter, qos)
        self.qos, self.frame_bytes, self.id_at, self.count = qos, frame_bytes, id_at, 0
        self.start()

    def take(self) -> None:
        data = self.rest + self.receive()
        if not self.qos:
            count = len(data) // self.frame_bytes
            self.rest = data[count * self.frame_bytes :]
            self.count += count
            return
        at, end, size = 0, len(data), self.frame_bytes
        while at < end:  # runs of frames and of PUBREL
            stop = at
            if data[at] == 0x62:
                while stop + 4 <= end and data[stop] == 0x62:
                    stop += 4
                self.out += answers(0x70, (data[at + 2 : stop : 4], data[at + 3 : stop : 4]))
            else:
                while stop + size <= end and data[stop] != 0x62:
                    stop += size
                ids = data[at + self.id_at : stop : size], data[at + self.id_at + 1 : stop : size]
                self.out += answers(0x40 if self.qos == 1 else 0x50, ids)
                self.count += (stop - at) // size
            if stop == at:
                break
            at = stop
        self.rest = data[at:]
        self.flush()


class Publisher(Client):
    """Sends frames of one QoS, of which *window* may be without an answer."""

    def __init__(self, port: int, name: str, frames: list[bytes], qos: int, window: int) -> None:
        super().__init__(port, name)
        self.frames, self.qos, self.window = frames, qos, window
        self.sent = self.done = self.next_id = 0
        self.start()

    def give(self, room: int) -> None:
        """Send what *room* and the window allow."""
        self.flush()
        if self.qos:
            room = min(room, self.window - (self.sent - self.done))
        if room <= 0 or len(self.out) > BLOCK_BYTES:
            return
        count = min(room, 256)
        if not self.qos:
            names = len(self.frames)
            start = self.sent % names
            self.out += b"".join([self.frames[(start + index) % names] for index in range(count)])
        else:
            head, tail = self.frames
            parts: list[bytes] = []
            for _ in range(count):
                self.next_id = self.next_id % 65_000 + 1
                parts += head, self.next_id.to_bytes(2), tail
            self.out += b"".join(parts)
        self.sent += count
        self.flush()

    def take(self) -> None:
        data = self.rest + self.receive()
        end = len(data) // 4 * 4
        self.rest, data = data[end:], data[:end]
        if self.qos == 1:
            self.done += end // 4
            return
        received = [at for at in range(0, end, 4) if data[at] == 0x50]
        self.done += end // 4 - len(received)
        if received:
            self.out += b"".join([b"\x62\x02" + data[at + 2 : at + 4] for at in received])
            self.flush()


class Poll:
    """Waits for many clients; closes them at the end."""

    def __init__(self, clients: list[Client]) -> None:
        self._poll = select.epoll()
        self._clients = {each.socket.fileno(): each for each in clients}
        for fd in self._clients:
            self._poll.register(fd, select.EPOLLIN)

    def take(self) -> list[Client]:
        """Let clients take what has come, or wait for a millisecond; return these clients."""
        found = [self._clients[fd] for fd, _ in self._poll.poll(0.001)]
        for client in found:
            client.take()
        return found

    def close(self) -> None:
        self._poll.close()
        for client in self._clients.values():
            client.socket.close()


# loads


def one_way(publishers: int, subscribers: int, qos: int, window: int, payload_bytes: int) -> Load:
    """Return deliveries a second from *publishers*, each to *subscribers*, after a warm-up."""

    def run(target: Target, seconds: float) -> tuple[float, ...]:
        groups: list[list[Subscriber]] = []
        senders: list[Publisher] = []
        for number in range(publishers):
            topic = f"bench/{number:02}"
            head, tail = frame(topic, payload_bytes, qos)
            size, port = len(head) + len(tail) + (2 if qos else 0), target.port
            group = [Subscriber(port, f"s{number}-{i}", topic, qos, size, len(head)) for i in range(subscribers)]
            groups.append(group)
            senders.append(Publisher(port, f"p{number}", [head, tail] if qos else [head + tail], qos, window))
        everybody = [one for group in groups for one in group]
        poll = Poll([*senders, *everybody])
        warm = time.monotonic() + WARM_S
        first, start, now = 0, 0.0, 0.0
        while not start or now < start + seconds:
            for sender, group in zip(senders, groups, strict=True):
                sender.give(window - (sender.sent - min(one.count for one in group)))
            poll.take()
            now = time.monotonic()
            if not start and now >= warm:
                first, start = sum(one.count for one in everybody), now
        rate = (sum(one.count for one in everybody) - first) / (now - start)
        poll.close()
        return (rate,)

    return run


def many(publishers: int, qos: int, payload_bytes: int) -> Load:
    """Return messages a second of *publishers* that each wait for the answer to one, without subscribers."""

    def run(target: Target, seconds: float) -> tuple[float, ...]:
        senders: list[Publisher] = []
        for number in range(publishers):
            head, tail = frame(f"bench/{number:04}", payload_bytes, qos)
            senders.append(Publisher(target.port, f"p{number}", [head, tail], qos, 1))
        poll = Poll([*senders])
        for sender in senders:
            sender.give(1)
        warm = time.monotonic() + WARM_S
        first, start, now = 0, 0.0, 0.0
        while not start or now < start + seconds:
            for sender in poll.take():
                assert isinstance(sender, Publisher)
                sender.give(1)
            now = time.monotonic()
            if not start and now >= warm:
                first, start = sum(each.done for each in senders), now
        rate = (sum(each.done for each in senders) - first) / (now - start)
        poll.close()
        return (rate,)

    return run


def names(count: int, filters: int, payload_bytes: int) -> Load:
    """Return messages a second of *count* names, each for one of *filters* subscribers, from the first one on."""

    def run(target: Target, seconds: float) -> tuple[float, ...]:
        frames = [b"".join(frame(f"n/{i % filters:02}/{i:05}", payload_bytes, 0)) for i in range(count)]
        everybody = [Subscriber(target.port, f"s{i}", f"n/{i:02}/+", 0, len(frames[0]), 0) for i in range(filters)]
        publisher, window = Publisher(target.port, "p", frames, 0, 2000), 2000
        poll = Poll([publisher, *everybody])
        began = now = time.monotonic()
        while now < began + seconds:
            publisher.give(window - (publisher.sent - sum(each.count for each in everybody)))
            poll.take()
            now = time.monotonic()
        rate = sum(each.count for each in everybody) / (now - began)
        poll.close()
        return (rate,)

    return run


def connects(target: Target, seconds: float) -> tuple[float, ...]:
    """Return how many clients a second connect, 100 at a time, and close the connection when they are accepted."""
    began, count = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        batch = []
        for number in range(count, count + AT_ONCE):
            client = socket.socket()
            client.connect(("127.0.0.1", target.port))
            client.send(hello(f"c{number}"))
            batch.append(client)
        for client in batch:
            assert client.recv(4), "the broker closed the connection"
            client.close()
        count += len(batch)
    return (count / (time.monotonic() - began),)


def memory(connections: int) -> Load:
    """Return the broker's resident KiB per idle connection, and per one with a subscription of its own."""

    def run(target: Target, seconds: float) -> tuple[float, ...]:
        def opened(first: int, count: int, kind: str) -> Iterator[Client]:
            for number in range(first, first + count):
                client = Client(target.port, f"{kind}{number}", keep_alive_s=600)
                if kind == "s":
                    client.subscribe(f"device/{number}/#", 0)
                yield client

        clients = list(opened(0, AT_ONCE, "c"))  # so that the broker has loaded what it needs
        figures = []
        for kind in "cs":
            before = resident_kib(target.pid)
            clients += opened(len(clients), connections, kind)
            time.sleep(0.5)
            figures.append((resident_kib(target.pid) - before) / connections)
        for client in clients:
            client.socket.close()
        return tuple(figures)

    return run


def latency(payload_bytes: int) -> Load:
    """Return p50 and p99, in us, from send to receipt of QoS 0 at `STEADY_RATE` messages a second."""

    def run(target: Target, seconds: float) -> tuple[float, ...]:
        head, _ = frame("steady", payload_bytes, 0)
        size = len(head) + payload_bytes
        subscriber = Subscriber(target.port, "s", "steady", 0, size, 0)
        publisher = Publisher(target.port, "p", [head], 0, 0)
        found: list[float] = []
        filler, rest, clock = bytes(payload_bytes - 8), b"", time.perf_counter_ns
        began, count = time.perf_counter(), int(seconds * STEADY_RATE)
        for number in range(count + 1):
            # After the last message, wait for what is still under way.
            due = began + number / STEADY_RATE + (number == count)
            while len(found) < count and (left_s := due - time.perf_counter()) > 0:
                if not select.select([subscriber.socket], (), (), left_s)[0]:
                    break
                rest += subscriber.receive()
                now = clock()
                while len(rest) >= size:
                    found.append((now - int.from_bytes(rest[len(head) : len(head) + 8])) / 1000)
                    rest = rest[size:]
            if number < count:
                publisher.socket.sendall(head + clock().to_bytes(8) + filler)
        subscriber.socket.close()
        publisher.socket.close()
        found = sorted(found[count // 10 :])
        return found[len(found) // 2], found[len(found) * 99 // 100]

    return run
