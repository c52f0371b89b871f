"""What cannot be read fails the query with a sentence that says what to do, and a Spark user sees it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.broker_process import broker_process
from tests.client.patient import patient
from tests.users_plugin import users_plugin

from martlet.cli.main import main
from martlet_client.blocking import Admin
from martlet_remoting.wire.signatures import SigningKey
from martlet_spark.connection import CONNECTIONS
from martlet_spark.errors import OptionError, ReadError
from martlet_spark.source import MartletDataSource

from .conftest import Topic

USERS = """
[users.ann]
signing_key = "ann's secret"
rules = ["publish *", "read *", "manage *"]
[users.bob]
signing_key = "bob's secret"
"""
ANN = SigningKey("ann", "ann's secret")


class Closed:
    """A broker that knows its users and takes TLS; and options to reach it."""

    def __init__(self, endpoints: str, folder: Path) -> None:
        self.folder = folder
        with Admin(patient(endpoints, signing_key=ANN)) as admin:
            admin.create_topic("Orders", queues=1)
        for name in ("ann", "bob"):
            (folder / name).write_text(f"{name}'s secret")
        (folder / "nobody").write_text("a guess")
        self.options = {"endpoints": endpoints, "subscribe": "Orders", "timeoutMs": "20s", **self.user("ann")}
        self.tls = {"tlsCa": str(folder / "ca.pem")}

    def user(self, name: str, secret: str = "") -> dict[str, str]:
        return {"accessKey": name, "secretKey": f"file:{self.folder / (secret or name)}"}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("closed")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    (folder / "chain.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other-ca.pem"))
    (folder / "no.pem").write_text("nothing")
    (folder / "users.toml").write_text(USERS)
    settings = {
        "plugins.enabled": '["nameserver", "remoting", "users"]',
        "users.file": json.dumps(str(folder / "users.toml")),
    }
    for part in ("remoting", "nameserver"):
        settings |= {f"{part}.tls_cert": str(folder / "chain.pem"), f"{part}.tls_key": str(folder / "key.pem")}
    with broker_process(folder / "data", settings, users_plugin(folder)) as endpoints:
        yield Closed(endpoints, folder)
        CONNECTIONS.close()


def read(options: dict[str, str]) -> list[bytes]:
    """Read a batch without Spark."""
    source = MartletDataSource(options)
    reader = source.reader(source.schema())
    found: list[bytes] = []
    for partition in reader.partitions():
        for batch in reader.read(partition):
            found += batch.column("body").to_pylist()  # type: ignore[union-attr]
    return found


def test_a_user_reads_with_and_without_tls(closed: Closed) -> None:
    for options in ({}, closed.tls, {"tlsInsecure": "true"}, {"tls": "true", "tlsInsecure": "true"}):
        assert read({**closed.options, **options}) == []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tlsCa": "other-ca.pem"}, "is not valid: unable to get local issuer certificate; name the authority"),
        ({"tls": "true"}, "name the authority that signed its certificate by the option tlsCa"),
        (
            {"tlsCa": "nowhere.pem"},
            "name the file {folder}/nowhere.pem, which cannot be used: No such file or directory; every executor",
        ),
        ({"tlsCa": "no.pem"}, "name the file {folder}/no.pem, which cannot be used: "),
        ({"tlsCert": "no.pem"}, "name the file {folder}/no.pem, which cannot be used: "),
    ],
)
def test_tls_that_fails_says_which_option_is_wrong(closed: Closed, given: dict[str, str], text: str) -> None:
    options = {name: value if name == "tls" else str(closed.folder / value) for name, value in given.items()}
    with pytest.raises((ReadError, OptionError)) as caught:
        read({**closed.options, **options})
    assert text.format(folder=closed.folder) in str(caught.value)


def test_a_certificate_for_another_host_is_not_blamed_on_its_authority(closed: Closed) -> None:
    endpoints = closed.options["endpoints"].replace("127.0.0.1", "localhost")
    with pytest.raises(
        ReadError, match="certificate is not valid for 'localhost'; use an address that it names"
    ) as caught:
        read({**closed.options, **closed.tls, "endpoints": endpoints})
    assert "tlsCa" not in str(caught.value)


def test_a_command_names_its_own_options(closed: Closed, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pipeline", "archive", "Orders", "--to", str(closed.folder / "x"), "-n", closed.options["endpoints"]]
    words += ["--access-key", "bob", "--secret-file", str(closed.folder / "bob")]
    for tls, text in (
        (
            ["--tls-ca", "other-ca.pem"],
            "; name the authority that signed its certificate by the option --tls-ca\n",
        ),
        (["--tls-ca", "no.pem"], "options --tls-ca, --tls-cert and --tls-key name the file "),
        (
            ["--tls-ca", "ca.pem"],
            "check the options --access-key and --secret-file, and what the brokers allow this user\n",
        ),
    ):
        assert main([*words, tls[0], str(closed.folder / tls[1])]) in (1, 2)
        assert text in capsys.readouterr().err


@pytest.mark.spark
@pytest.mark.parametrize(("name", "secret"), [("ann", "nobody"), ("bob", "bob"), ("mallory", "nobody")])
def test_wrong_credentials_fail_a_query(spark: SparkSession, closed: Closed, name: str, secret: str) -> None:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("martlet").options(**{**closed.options, **closed.user(name, secret)}).load().collect()
    assert ("or this user may not read it" if name == "bob" else "NO_PERMISSION") in str(caught.value)
    assert " check the options accessKey and secretKey" in str(caught.value)
    assert "a guess" not in str(caught.value)


@pytest.mark.spark
def test_a_wrong_authority_fails_a_query(spark: SparkSession, closed: Closed) -> None:
    options = {**closed.options, "tlsCa": str(closed.folder / "other-ca.pem")}
    with pytest.raises(PySparkException, match="name the authority that signed its certificate by the option tlsCa"):
        spark.read.format("martlet").options(**options).load().collect()


@pytest.mark.spark
def test_a_table_loses_its_options(spark: SparkSession, topic: Topic) -> None:
    """Spark passes the options of a temporary view, but not those of a table."""
    options = f"endpoints '{topic.endpoints}', subscribe '{topic.name}'"
    with pytest.raises(PySparkException) as caught:
        spark.sql(f"CREATE TABLE lost USING martlet OPTIONS ({options})").collect()
    assert "loses its options in Spark; use CREATE TEMPORARY VIEW instead" in str(caught.value)
    spark.sql(f"CREATE TABLE lost (body BINARY) USING martlet OPTIONS ({options})")
    with pytest.raises(PySparkException) as caught:
        spark.sql("SELECT * FROM lost").collect()
    assert "option endpoints is missing; give the name servers" in str(caught.value)
    assert "for a SQL table, give it in each statement: WITH (endpoints '...')" in str(caught.value)
    written = f"endpoints '{topic.endpoints}', topic '{topic.name}'"
    spark.sql(f"INSERT INTO lost WITH ({written}) SELECT cast('x' AS BINARY)")
    assert [bytes(row.body) for row in spark.sql(f"SELECT * FROM lost WITH ({options})").collect()] == [b"x"]
    spark.sql("DROP TABLE IF EXISTS lost")


@pytest.mark.spark
def test_a_damaged_record_fails_the_query(spark: SparkSession, tmp_path: Path) -> None:
    data, small = tmp_path / "data", {"store.segment_bytes": str(1 << 16)}
    with broker_process(data, small) as endpoints:
        topic = Topic(endpoints)
        topic.send(400, queues=(0,))
        CONNECTIONS.close()
    with (data / "commitlog" / "00000000000000000000").open("r+b") as segment:
        segment.seek(segment.read().index(topic.bodies[1]))
        segment.write(b"X")
    with broker_process(data, small) as endpoints:
        topic.endpoints = endpoints
        with pytest.raises(PySparkException) as caught:
            spark.read.format("martlet").options(**topic.options).load().collect()
        assert "message 1 of queue 0 (position " in str(caught.value)
        hint = "'martlet store verify' lists damaged messages; set failOnDataLoss to false to continue without them"
        assert f"does not match its CRC; {hint}" in str(caught.value)
        CONNECTIONS.close()
