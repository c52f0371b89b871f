"""A broker with TLS and access control: credentials by reference, and refusals that say what to do."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.client.patient import patient
from tests.interop.test_users import ANN, BOB, closed_martlet

from martlet.cli.main import main
from martlet_client import ClientSettings
from martlet_remoting.wire.signatures import SigningKey
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import OptionError, ReadError, SparkConnectorError

from .clusters import Messages, Stream, batch_of
from .test_sink import Query

pytestmark = pytest.mark.spark


@dataclass(frozen=True)
class Secured:
    """A topic that only ann may read, the certificate authority, and files with the secrets."""

    topic: Messages
    authority: Path
    folder: Path

    def options(self, user: dict[str, str]) -> dict[str, str]:
        """Options for *user*, whose secret is in a file."""
        path = self.folder / user["access_key"]
        path.write_text(user["secret_key"] + "\n")
        return {"tlsCa": str(self.authority), "accessKey": user["access_key"], "secretKey": f"file:{path}"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    said = {"tls": "enforcing", "tls_cert": str(folder / "server.pem")}
    settings = {f"{part}.{name}": text for part in ("remoting", "nameserver") for name, text in said.items()}
    settings["plugins.enabled"] = '["nameserver", "remoting", "users", "tx"]'
    broker = closed_martlet(folder, settings)
    try:
        tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        key = SigningKey(ANN["access_key"], ANN["secret_key"])
        topic = Messages(broker.name_server, settings=patient(broker.name_server, tls=tls, signing_key=key))
        topic.send(40)
        yield Secured(topic, folder / "ca.pem", folder)
        CONNECTIONS.close()
    finally:
        broker.close()


def test_queries_in_spark_sign_and_encrypt(spark: SparkSession, secured: Secured, tmp_path: Path) -> None:
    """The source, the sink and the archive of a command."""
    signed = secured.options(ANN)
    options = {**secured.topic.options, **signed}
    settings = secured.topic.client
    assert isinstance(settings, ClientSettings)
    target = Messages(secured.topic.endpoints, settings=settings)
    read = spark.readStream.format("martlet").options(**options, startingOffsets="earliest", columns="body")
    query = (
        read.option("group", "spark")
        .load()
        .writeStream.format("martlet")
        .options(endpoints=target.endpoints, topic=target.name, **signed)
    )
    query.option("checkpointLocation", str(tmp_path / "copy")).trigger(availableNow=True).start().awaitTermination()
    rows = spark.read.format("martlet").options(**{**options, "subscribe": target.name}).load()
    assert sorted(bytes(row.body) for row in rows.collect()) == sorted(secured.topic.bodies)
    words = ["-n", target.endpoints, "--tls-ca", str(secured.authority), "--access-key", signed["accessKey"]]
    words += ["--secret-file", signed["secretKey"].removeprefix("file:"), "--to", str(tmp_path / "archive")]
    assert main(["pipeline", "archive", secured.topic.name, *words]) == 0
    assert spark.read.parquet(str(tmp_path / "archive")).count() == len(secured.topic.bodies)
    wrong = {**options, **secured.options({**ANN, "secret_key": "a guess"})}
    with pytest.raises(PySparkException, match="check the options accessKey and secretKey") as caught:
        spark.read.format("martlet").options(**wrong).load().collect()
    assert "a guess" not in str(caught.value)
    written = spark.range(3).selectExpr("string(id) AS body").write.format("martlet").mode("append")
    sink = {"endpoints": target.endpoints, "topic": target.name, "guarantee": "at-least-once"}
    refused = {**sink, **secured.options({**ANN, "secret_key": "a guess"})}
    with pytest.raises(PySparkException, match="check the options accessKey and secretKey") as caught:
        written.options(**refused).save()
    assert "a guess" not in str(caught.value)
    assert sorted(batch_of(target, **secured.options(ANN))) == sorted(secured.topic.bodies)


def test_the_sink_signs_and_encrypts(secured: Secured) -> None:
    settings = secured.topic.client
    assert isinstance(settings, ClientSettings)
    topic = Messages(secured.topic.endpoints, settings=settings)
    query = Query(topic, "query", "run-1", 0, **secured.options(ANN))
    query.writer.commit_parts(query.batch(0, *range(20)))
    for text, options in (
        ("check the options accessKey and secretKey", secured.options({**ANN, "secret_key": "a guess"})),
        ("closed the connection|TLS with .* failed|is lost", {"timeoutMs": "0"}),
    ):
        with pytest.raises(SparkConnectorError, match=text):
            Query(topic, "query", "run-2", 0, **options).batch(1, 1, 2)
    assert sorted(map(int, batch_of(topic, **secured.options(ANN)))) == list(range(20))


def test_a_secret_may_be_in_the_environment(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARTLET_TEST_SECRET", ANN["secret_key"])
    options = {**secured.options(ANN), "secretKey": "env:MARTLET_TEST_SECRET"}
    assert sorted(batch_of(secured.topic, **options)) == sorted(secured.topic.bodies)


def test_a_stream_shows_its_progress_with_signed_requests(secured: Secured) -> None:
    stream = Stream(secured.topic, **secured.options(ANN), group="spark", pollMs="1")
    assert stream.batch() == sorted(secured.topic.bodies)
    assert stream.plan() == stream.offset
    stream.reader.stop()


@pytest.mark.parametrize("user", [BOB, {**ANN, "secret_key": "a guess"}, {"access_key": "nobody", "secret_key": "x"}])
def test_others_are_refused(secured: Secured, user: dict[str, str]) -> None:
    # The name server hides the topic from a user who may not read it.
    reason = "is unknown to name server .*, or this user may not read it.*" if user is BOB else "NO_PERMISSION.*"
    with pytest.raises(ReadError, match=f"{reason} check the options accessKey and secretKey") as caught:
        list(batch_of(secured.topic, **secured.options(user)))
    assert user["secret_key"] not in str(caught.value).replace("accessKey", "")
    stream = Stream(secured.topic, **secured.options(user))
    with pytest.raises(ReadError, match="check the options accessKey and secretKey"):
        stream.plan()


def test_a_connection_without_tls_or_trust_fails_with_a_sentence(secured: Secured, tmp_path: Path) -> None:
    signed = {name: text for name, text in secured.options(ANN).items() if not name.startswith("tls")}
    with pytest.raises(ReadError, match=r"no name server of .* answered"):
        list(batch_of(secured.topic, **signed, timeoutMs="0"))
    with pytest.raises(ReadError, match=r"the certificate of .* is not valid: .*; name the authority"):
        list(batch_of(secured.topic, **signed, tls="true", timeoutMs="0"))
    (tmp_path / "text.pem").write_text("no certificate")
    for option, file in (("tlsCa", "none.pem"), ("tlsCa", "text.pem"), ("tlsCert", "none.pem"), ("tlsKey", "text.pem")):
        files = {option: str(tmp_path / file)} | ({"tlsCert": str(secured.authority)} if option == "tlsKey" else {})
        with pytest.raises(OptionError, match=rf"{file}, which cannot be used: .*; every executor needs it"):
            list(batch_of(secured.topic, **signed, **files, timeoutMs="0"))
