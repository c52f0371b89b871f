"""RocketMQ's Java client, steered from Python: one JVM a client version, commands and events as lines of JSON."""

import base64
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import class_archives, fetch

T = TypeVar("T")

ANSWER_LIMIT_S = 180.0
EVENT_LIMIT_S = 180.0  # the real broker's first retry of a young group takes up to 40 s


class Failed(Exception):
    """A command that the Java client refused: the exception's class, RocketMQ's code (-1: none) and its text."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error['type']} {error['code']}: {error['message']}")
        self.type: str = error["type"]
        self.code: int = error["code"]
        self.message: str = error["message"]


def found(ask: Callable[[], T]) -> T | None:
    """Return the answer, or None while there is none: an index may be behind the log, a route behind its topic."""
    try:
        return ask()
    except Failed:
        return None


@dataclass(frozen=True)
class Received:
    """A message as the Java client shows it."""

    topic: str
    queue: int
    offset: int
    body: bytes
    tags: str | None
    keys: str | None
    properties: dict[str, str]
    reconsume_times: int
    msg_id: str
    offset_msg_id: str
    sys_flag: int
    stored_size: int
    born_ms: int
    stored_ms: int
    broker: str | None
    attempt: int = 1
    accepted: bool = True


def received(shown: Mapping[str, Any], attempt: int = 1, accepted: bool = True) -> Received:
    fields = {"tags": None, "keys": None, "broker": None, **shown, "body": base64.b64decode(shown["body"])}
    return Received(**fields, attempt=attempt, accepted=accepted)


@dataclass(frozen=True)
class Sent:
    """A send's result, or its error."""

    status: str = ""
    msg_id: str = ""
    offset_msg_id: str = ""
    broker: str = ""
    queue: int = -1
    offset: int = -1
    recall_handle: str | None = None
    error: Failed | None = None


def archive(version: str) -> Path:
    """Return where the class archive of the driver of one version of the client is."""
    jars = (fetch.driver_classes(version), fetch.client_jars(version))
    return class_archives.archive(f"driver-{version}", jars)


class Jvm:
    """A JVM that runs the driver; commands may overlap, events are kept until somebody asks for them."""

    def __init__(self, version: str, folder: Path, properties: Mapping[str, str] | None = None) -> None:
        self.version = version
        folder.mkdir(parents=True, exist_ok=True)
        write_log_config(folder)
        said = {
            "user.home": str(folder),
            "rocketmq.home.dir": str(folder),
            "rocketmq.client.logRoot": str(folder / "logs"),
            "java.io.tmpdir": str(folder),
        }
        said |= {"rocketmq.client.localOffsetStoreDir": str(folder / "offsets")}
        said |= {"com.rocketmq.remoting.client.connect.timeout": "60000", **(properties or {})}
        words = [fetch.tool("java"), "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        words += class_archives.words(archive(version))
        words += [f"-D{key}={value}" for key, value in said.items()]
        words += ["--add-opens=java.base/java.lang=ALL-UNNAMED"]  # for QuickStop
        words += ["-cp", fetch.driver(version), "interop.Driver"]
        self._errors = (folder / "driver.log").open("ab")
        self._child = subprocess.Popen(
            words,
            cwd=folder,  # the admin tool leaves files in its current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._wait(lambda: self._events or None, ANSWER_LIMIT_S, "the driver did not start")

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command to its end and return its result.

        Raises:
          Failed: the client threw.
        """
        return self.begin(command, **arguments)()

    def begin(self, command: str, **arguments: Any) -> Callable[[], Any]:
        """Start a command; calling what is returned waits for its end, as `call` does."""
        number = next(self._ids)
        said = {key: value for key, value in arguments.items() if value is not None}
        line = json.dumps({"id": number, "do": command, **said}) + "\n"
        assert self._child.stdin is not None
        self._child.stdin.write(line.encode())
        self._child.stdin.flush()

        def finish() -> Any:
            answer = self._wait(lambda: self._answers.pop(number, None), ANSWER_LIMIT_S, f"no answer to {command}")
            if "error" in answer:
                raise Failed(answer["error"])
            return answer.get("result")

        return finish

    def events(self, consumer: str) -> list[Received]:
        """Return every delivery to *consumer* up to now."""
        with self._changed:
            return [_delivery(e) for e in self._events if e.get("consumer") == consumer]

    def wait_events(
        self, consumer: str, enough: Callable[[list[Received]], bool], limit_s: float = EVENT_LIMIT_S
    ) -> list[Received]:
        """Return the deliveries to *consumer* once they are *enough*; raises with what there was after *limit_s*."""

        def look() -> list[Received] | None:
            seen = [_delivery(e) for e in self._events if e.get("consumer") == consumer]
            return seen if enough(seen) else None

        def complaint() -> str:
            return f"{consumer} saw too little: {[m.body[:40] for m in self.events(consumer)]}"

        return self._wait(look, limit_s, complaint)

    def kill(self) -> None:
        """End the JVM as a crash would: its sockets close, nothing is said goodbye to."""
        self._child.kill()
        self._close()

    def stop(self) -> None:
        """End the JVM; the end of its input is its sign."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._close()

    def _close(self) -> None:
        self._child.wait()
        self._reader.join()
        for stream in (self._child.stdin, self._child.stdout, self._errors):
            if stream is not None and not stream.closed:
                stream.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            said = json.loads(line)
            with self._changed:
                if "id" in said:
                    self._answers[said["id"]] = said
                else:
                    self._events.append(said)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait(self, look: Callable[[], T | None], limit_s: float, what: str | Callable[[], str]) -> T:
        deadline = time.monotonic() + limit_s
        with self._changed:
            while (found := look()) is None:
                if self._ended:
                    raise RuntimeError(f"the JVM ended with {self._child.poll()}")
                if time.monotonic() > deadline:
                    break
                self._changed.wait(deadline - time.monotonic())
        if found is None:
            raise TimeoutError(what if isinstance(what, str) else what())
        return found


def _delivery(event: Mapping[str, Any]) -> Received:
    return received(event["message"], event["attempt"], event["accepted"])


# The admin tool of 4.x refuses to work without this file.
LOG_CONFIG = """<configuration>
  <appender name="none" class="ch.qos.logback.core.helpers.NOPAppender"/>
  <root level="OFF"><appender-ref ref="none"/></root>
</configuration>
"""


def write_log_config(folder: Path) -> None:
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "logback_tools.xml").write_text(LOG_CONFIG)


@dataclass(frozen=True)
class Queue:
    """One queue, as the Java client names it."""

    topic: str
    broker: str
    queue: int


def message(topic: str, body: bytes | str, **more: Any) -> dict[str, Any]:
    """Return a message for `Producer.send`.

    *more*: tags, keys, properties, delay_level, system (properties that RocketMQ keeps for itself), and the
    client's own methods setDelayTimeSec, setDelayTimeMs and setDeliverTimeMs (5.x only).
    """
    raw = body.encode() if isinstance(body, str) else body
    return {"topic": topic, "body": base64.b64encode(raw).decode(), **more}


class Java:
    """The clients that one test starts in a JVM against one name server; `close` stops them all."""

    def __init__(self, jvm: Jvm, name_server: str) -> None:
        self.jvm = jvm
        self.name_server = name_server
        self._started: list[Started] = []
        self._numbers = itertools.count(1)
        self._prefix = f"c{time.monotonic_ns() % 10**9}"

    def producer(self, group: str = "interop_producer", **more: Any) -> "Producer":
        return Producer(self._start("producer", group=group, **more))

    def transactions(self, group: str, **more: Any) -> "TransactionProducer":
        return TransactionProducer(self._start("transactions", group=group, **more))

    def push(self, group: str, topics: str | Sequence[str], **more: Any) -> "PushConsumer":
        """Start a push consumer.

        *more*: expression, orderly, broadcasting, failures, retries_max, instance, from, replying (to each message),
        client_rebalance, invisible_ms, pop_pause_s after each failure (5.x only).
        """
        several = [topics] if isinstance(topics, str) else list(topics)
        settings = {"expression": "*", "from": "FIRST_OFFSET", "failures": 0, **more}
        return PushConsumer(self._start("push", group=group, topics=several, **settings))

    def lite(self, group: str, topic: str, **more: Any) -> "LitePull":
        """Start a lite pull consumer. *more*: expression, assign, auto_commit."""
        return LitePull(self._start("lite", group=group, topic=topic, **{"expression": "*", **more}), topic)

    def pops(self, address: str, broker: str, group: str, topic: str) -> "Pops":
        """Return a client that pops queue 0 of a topic by single requests (5.x only)."""
        place = {"broker_address": address, "broker": broker, "group": group, "topic": topic, "queue": 0}
        return Pops(self._start("pops"), place)

    def queries(self, **more: Any) -> "Queries":
        return Queries(self._start("query", **more))

    def monitor(self) -> "Monitor":
        """Return an admin client as RocketMQ's exporter and dashboard have one."""
        return Monitor(self._start("monitor"))

    def mqadmin(self, *words: str, **more: Any) -> str:
        """Run the official admin tool and return what it printed. *more*: access_key and secret_key."""
        return str(self.jvm.call("mqadmin", words=[*words, "-n", self.name_server], **more))

    def close(self) -> None:
        """Stop all clients and wait until they have."""
        for finish in self._begin_stops():
            finish()

    def leave(self) -> None:
        """Let all clients stop, without waiting: no other test uses their groups."""
        self._begin_stops()

    def _begin_stops(self) -> list[Callable[[], object]]:
        stops = [started.begin_stop() for started in reversed(self._started)]
        self._started.clear()
        return stops

    def _start(self, kind: str, **settings: Any) -> "Started":
        started = Started(self.jvm, kind, f"{self._prefix}-{next(self._numbers)}")
        started.call("start", name_server=self.name_server, **settings)
        self._started.append(started)
        return started


class Started:
    """One client in the JVM."""

    def __init__(self, jvm: Jvm, kind: str, name: str) -> None:
        self.jvm, self.kind, self.name = jvm, kind, name
        self.stopped = False

    def call(self, verb: str, **arguments: Any) -> Any:
        return self.jvm.call(f"{self.kind}.{verb}", name=self.name, **arguments)

    def stop(self) -> None:
        self.begin_stop()()

    def begin_stop(self) -> Callable[[], object]:
        """Stop unless that has happened; calling what is returned waits for the end."""
        if self.stopped or not self.jvm.running:
            return lambda: None
        self.stopped = True
        return self.jvm.begin(f"{self.kind}.stop", name=self.name)


class Client:
    """What every client can do: stop."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self.name = started.name

    def stop(self) -> None:
        self._started.stop()


class Producer(Client):
    def send(self, *messages: Mapping[str, Any], how: str = "sync", **more: Any) -> list[Sent]:
        """Send each message (or all as one, how="batch"); *how*: sync, async, oneway, batch; *more*: select, to.

        Raises:
          Failed: any of them was refused.
        """
        results = self.try_send(*messages, how=how, **more)
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    def try_send(self, *messages: Mapping[str, Any], how: str = "sync", **more: Any) -> list[Sent]:
        """As `send`, with each refusal in its place."""
        if isinstance(more.get("to"), Queue):
            more["to"] = vars(more["to"])
        return _sent(self._started.call("send", messages=list(messages), how=how, **more))

    def request(self, message: Mapping[str, Any], timeout_ms: int = 120_000) -> tuple[bytes, dict[str, str]]:
        """Send a request; return the body and the properties of its reply.

        Raises:
          Failed: it was refused, or no reply came in time.
        """
        reply = self._started.call("request", messages=[message], timeout_ms=timeout_ms)
        return base64.b64decode(reply["body"]), reply["properties"]

    def recall(self, topic: str, handle: str) -> str:
        """Recall a timed message (5.x only); return its id.

        Raises:
          Failed: the broker refused it.
        """
        return str(self._started.call("recall", topic=topic, handle=handle))

    def flood(self, topic: str, prefix: str) -> Callable[[], list[Sent]]:
        """Start to send "*prefix* 0", "*prefix* 1" and so on, up to the first failure, whose result is the last.

        What is returned waits for it.
        """
        finish = self._started.jvm.begin("producer.flood", name=self._started.name, topic=topic, prefix=prefix)
        return lambda: _sent(finish())

    def queues(self, topic: str) -> list[Queue]:
        return _queues(self._started.call("queues", topic=topic))


def _sent(answers: Iterable[Mapping[str, Any]]) -> list[Sent]:
    return [Sent(error=Failed(a["error"])) if "error" in a else Sent(**a) for a in answers]


class TransactionProducer(Client):
    """Answers with what the properties of a message say: ``local`` at once, ``check`` when it is asked."""

    def send(self, *messages: Mapping[str, Any]) -> list[Sent]:
        """Send each message in a transaction.

        Raises:
          Failed: any of them was refused.
        """
        results = _sent(self._started.call("send", messages=list(messages)))
        for result in results:
            if result.error is not None:
                raise result.error
        return results

    @property
    def checks(self) -> list[Received]:
        """Return every check that came up to now."""
        return self._started.jvm.events(self.name)

    def wait_checks(self, enough: Callable[[list[Received]], bool]) -> list[Received]:
        return self._started.jvm.wait_events(self.name, enough)


class PushConsumer(Client):
    @property
    def seen(self) -> list[Received]:
        return self._started.jvm.events(self.name)

    def wait(self, enough: int | Callable[[list[Received]], bool], limit_s: float = EVENT_LIMIT_S) -> list[Received]:
        """Return the deliveries once there are *enough* (a count of them, or a condition on them)."""
        if isinstance(enough, int):
            count = enough
            return self._started.jvm.wait_events(self.name, lambda seen: len(seen) >= count, limit_s)
        return self._started.jvm.wait_events(self.name, enough, limit_s)

    def wait_bodies(self, bodies: Iterable[bytes], limit_s: float = EVENT_LIMIT_S) -> list[Received]:
        """Return the deliveries once each of *bodies* was delivered."""
        wanted = set(bodies)
        return self.wait(lambda seen: wanted <= {m.body for m in seen}, limit_s)

    def queues(self) -> list[Queue]:
        """Return the queues that the consumer holds now."""
        return _queues(self._started.call("queues"))

    def commit(self) -> None:
        """Tell the brokers now what is consumed; no answer is waited for."""
        self._started.call("commit")

    def heal(self) -> None:
        """Accept every message from now on."""
        self._started.call("heal")


class LitePull(Client):
    def __init__(self, started: Started, topic: str) -> None:
        super().__init__(started)
        self.topic = topic

    def poll(self, wait_ms: int = 1000) -> list[Received]:
        return [received(m) for m in self._started.call("poll", wait_ms=wait_ms)]

    def poll_until(self, count: int, limit_s: float = EVENT_LIMIT_S) -> list[Received]:
        """Poll until *count* messages came."""
        return self._poll_while(lambda seen: len(seen) < count, limit_s)

    def poll_bodies(self, bodies: Iterable[bytes], limit_s: float = EVENT_LIMIT_S) -> list[Received]:
        """Poll until each of *bodies* came."""
        wanted = set(bodies)
        return self._poll_while(lambda seen: not wanted <= {m.body for m in seen}, limit_s)

    def _poll_while(self, missing: Callable[[list[Received]], bool], limit_s: float) -> list[Received]:
        seen: list[Received] = []
        deadline = time.monotonic() + limit_s
        while missing(seen):
            if time.monotonic() > deadline:
                raise TimeoutError(f"too few messages came, {len(seen)}: {[m.body[:40] for m in seen]}")
            seen += self.poll()
        return seen

    def queues(self) -> list[Queue]:
        return _queues(self._started.call("queues", topic=self.topic))

    def assignment(self) -> list[Queue]:
        return _queues(self._started.call("assignment"))

    def seek(self, queue: Queue, where: int | str) -> None:
        """Continue from an offset, or from "begin" or "end"."""
        self._started.call("seek", where=str(where), **vars(queue))

    def offset_at(self, queue: Queue, time_ms: int) -> int:
        return int(self._started.call("offset_at", time_ms=time_ms, **vars(queue)))

    def commit(self) -> None:
        self._started.call("commit")

    def committed(self, queue: Queue) -> int:
        return int(self._started.call("committed", **vars(queue)))


class Pops(Client):
    def __init__(self, started: Started, place: Mapping[str, Any]) -> None:
        super().__init__(started)
        self._place = place
        self.group, self.topic = str(place["group"]), str(place["topic"])

    def pop(self, count: int, *, invisible_ms: int, poll_ms: int = 0, order: bool = False) -> list[Received]:
        """Take up to *count* messages; waits for *poll_ms* if there are none."""
        settings = {"count": count, "invisible_ms": invisible_ms, "poll_ms": poll_ms, "order": order}
        return [received(m) for m in self._call("pop", **settings)]

    def ack(self, *popped: Received) -> str:
        """Acknowledge messages, several in a batch; return the status."""
        return str(self._call("ack", handles=[handle(each) for each in popped])["status"])

    def change(self, popped: Received, invisible_ms: int) -> str:
        """Let a message come again after *invisible_ms*; return the status."""
        return str(self._call("change", handle=handle(popped), invisible_ms=invisible_ms)["status"])

    def notify(self, poll_ms: int) -> bool:
        """Return whether there are messages to pop; waits for *poll_ms* if there are none."""
        return bool(self._call("notify", poll_ms=poll_ms))

    def begin_pop(self, count: int, *, invisible_ms: int, poll_ms: int) -> Callable[[], list[Received]]:
        """Start a pop; calling what is returned waits for its end."""
        settings = {"count": count, "invisible_ms": invisible_ms, "poll_ms": poll_ms, "order": False}
        finish = self._started.jvm.begin("pops.pop", name=self.name, **self._place, **settings)
        return lambda: [received(m) for m in finish()]

    def peek(self, count: int) -> list[Received]:
        return [received(m) for m in self._call("peek", count=count)]

    def waiting(self) -> int:
        """Return how many pops of the group wait."""
        return int(self._call("waiting"))

    def _call(self, verb: str, **settings: Any) -> Any:
        return self._started.call(verb, **self._place, **settings)


def handle(popped: Received) -> str:
    return popped.properties["POP_CK"]


class Monitor(Client):
    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of RocketMQ's DefaultMQAdminExt; keys of its tables that are objects come as text."""
        return self._started.call("call", method=method, arguments=list(arguments))


class Queries(Client):
    def create_topic(self, topic: str, broker_address: str, queues: int = 1, **more: Any) -> None:
        self._started.call("create_topic", topic=topic, broker_address=broker_address, queues=queues, **more)

    def view(self, topic: str, msg_id: str) -> Received:
        return received(self._started.call("view", topic=topic, msg_id=msg_id))

    def by_key(self, topic: str, key: str, count_max: int = 32) -> list[Received]:
        return [received(m) for m in self._started.call("by_key", topic=topic, key=key, count_max=count_max)]

    def offsets(self, queue: Queue) -> dict[str, int]:
        """Return min, max and earliest_ms of a queue."""
        return dict(self._started.call("offsets", **vars(queue)))

    def offset_at(self, queue: Queue, time_ms: int) -> int:
        return int(self._started.call("offset_at", time_ms=time_ms, **vars(queue)))

    def reset(self, topic: str, group: str, time_ms: int) -> dict[int, int]:
        """Move a group to the first message at or after a time; returns queue id -> offset."""
        moved = self._started.call("reset", topic=topic, group=group, time_ms=time_ms)
        return {int(queue): int(offset) for queue, offset in moved.items()}


def _queues(shown: Iterable[Mapping[str, Any]]) -> list[Queue]:
    return sorted((Queue(**q) for q in shown), key=lambda q: (q.topic, q.broker, q.queue))
