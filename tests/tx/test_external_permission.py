"""What the requests of external transactions ask the authorizers, and that a refusal changes nothing."""

from pathlib import Path

import orjson
import pytest
from tests.tx.test_external_remoting import ABORT, COMMIT, LIST, SparkSink, serving, spark

from martlet.broker import Broker
from martlet.contracts import Authorizer as Authorizes
from martlet.contracts import Identity
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_tx.plugin import TxPlugin

PREPARE = RequestCode.PREPARE_EXTERNAL_TRANSACTION
PUBLISH = ("publish", "T")
MANAGE = ("manage", "")


class Authorizer:
    """Remembers what it was asked, and denies what is in ``denied``."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.denied: set[tuple[str, str]] = set()
        self.brokers: list[Broker] = []  # those that it serves

    def __call__(self, identity: Identity, action: str, name: str) -> bool:
        self.asked.append((action, name))
        return (action, name) not in self.denied


@pytest.fixture
def authorizer(monkeypatch: pytest.MonkeyPatch) -> Authorizer:
    found = Authorizer()

    def authorizers(self: TxPlugin, broker: Broker) -> list[Authorizes]:
        found.brokers.append(broker)
        return [found]

    monkeypatch.setattr(TxPlugin, "martlet_authorizers", authorizers, raising=False)
    return found


async def each_request(sink: SparkSink, name: str) -> Command:
    if name == "begin":
        return await sink.begin("run")
    if name == "stage":
        return await sink.stage(0, "a", 0, [b"x"])
    if name == "list":
        return await sink.client.ask(LIST, {})
    code = {"prepare": PREPARE, "commit": COMMIT, "abort": ABORT}[name]
    return await sink.end(code, 0, [])


ASKED: dict[str, set[tuple[str, str]]] = {
    **{name: {PUBLISH} for name in ("begin", "stage", "prepare", "commit")},
    "abort": set(),
    "list": {MANAGE},
}


@pytest.mark.parametrize("name", ASKED)
async def test_authorizers_are_asked_about_each_topic(name: str, tmp_path: Path, authorizer: Authorizer) -> None:
    """Only to abort needs no permission: a producer's parts are its identity's own."""
    async with spark(tmp_path) as sink:
        answer = await each_request(sink, name)
        assert (answer.code, set(authorizer.asked)) == (ResponseCode.SUCCESS, ASKED[name])


@pytest.mark.parametrize("name", ["begin", "stage", "prepare", "commit", "list"])
async def test_a_no_is_an_error(name: str, tmp_path: Path, authorizer: Authorizer) -> None:
    authorizer.denied |= ASKED[name]
    async with spark(tmp_path) as sink:
        answer = await each_request(sink, name)
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "may not" in str(answer.remark)
        if name != "list":
            assert orjson.loads((await sink.client.ask(LIST, {})).body) == {"producers": []}


@pytest.mark.parametrize("name", ["begin", "stage", "prepare", "commit"])
async def test_a_refusal_does_not_tell_whether_the_topic_exists(
    name: str, tmp_path: Path, authorizer: Authorizer
) -> None:
    authorizer.denied |= {PUBLISH, ("publish", "U")}
    async with serving(tmp_path) as running:
        [found] = authorizer.brokers
        found.topics.ensure("T", 2)
        client = await running.connect()
        existing, missing = [await each_request(SparkSink(client, topic=topic), name) for topic in ("T", "U")]
        assert existing.code == ResponseCode.NO_PERMISSION
        assert (existing.code, existing.ext, existing.body) == (missing.code, missing.ext, missing.body)
        assert str(existing.remark).replace("[T]", "[U]") == missing.remark
        assert found.topics.get("U") is None


async def test_what_was_staged_before_the_permission_ended_is_not_delivered(
    tmp_path: Path, authorizer: Authorizer
) -> None:
    async with serving(tmp_path) as running:
        sink = SparkSink(await running.connect())
        await sink.begin("run")
        for part in ("a", "b"):
            assert (await sink.stage(0, part, 0, [b"x"])).code == 0
        authorizer.denied.add(PUBLISH)
        authorizer.brokers[0].rules.changed()
        for refused in (
            await sink.end(COMMIT, 0, [["a", 1], ["b", 1]]),
            await sink.end(PREPARE, 0, [["a", 1]]),
            await sink.stage(0, "c", 0, [b"x"]),
        ):
            assert refused.code == ResponseCode.NO_PERMISSION
        assert await sink.received() == []
        assert (await sink.end(ABORT, 0, None)).code == 0
        authorizer.denied.clear()
        authorizer.brokers[0].rules.changed()
        assert (await sink.end(COMMIT, 0, [["a", 1]])).code != 0  # its parts are gone
        assert await sink.received() == []


@pytest.mark.parametrize("known", ["true", "false"])
@pytest.mark.parametrize(
    ("topic", "code", "text"),
    [
        ("", ResponseCode.INVALID_PARAMETER, "names no topic; name one that the producer writes to"),
        ("T/secret", ResponseCode.NO_PERMISSION, "may not publish"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", ResponseCode.NO_PERMISSION, "only the broker writes it"),
        ("T/open", 0, ""),
        ("T", 0, ""),
    ],
)
async def test_a_run_begins_with_a_topic_that_it_may_write_to(
    topic: str, code: int, text: str, known: str, tmp_path: Path, authorizer: Authorizer
) -> None:
    """Who may publish nowhere must not make producers known, which are limited in number."""
    authorizer.denied.add(("publish", "T/secret"))
    async with spark(tmp_path) as sink:
        asked: dict[str, object] = {"producer": "p", "run": "r", "topic": topic, "known": known}
        answer = await sink.client.ask(RequestCode.BEGIN_EXTERNAL_TRANSACTIONS, asked)
        assert answer.code == code
        assert text in str(answer.remark)
        for request in COMMIT, PREPARE:
            asked = {"producer": "q", "epoch": 0, "sequence": 0, "topic": topic}
            assert (await sink.client.ask(request, asked)).code == code
        known_producers = orjson.loads((await sink.client.ask(LIST, {})).body)["producers"]
        assert bool(known_producers) is (code == 0)
