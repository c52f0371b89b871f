"""What is said to a user who mixes something up: the port, the group, the rights, the target."""

import os

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.client.patient import patient

from martlet.cli.main import main
from martlet.message import KEYS, UNIQ_KEY
from martlet_client.blocking import Admin
from martlet_remoting.wire.codes import ResponseCode
from martlet_spark.cluster import Cluster, rights_hint
from martlet_spark.connection import AnswerFrame, Security
from martlet_spark.errors import OptionError, ReadError, WriteError
from martlet_spark.pipelines.session import pass_on
from martlet_spark.source import MartletDataSource

from .conftest import Topic


def read(**options: str) -> None:
    source = MartletDataSource({"timeoutMs": "1s", **options})
    source.reader(source.schema()).partitions()


def test_the_port_of_a_broker_is_recognized(topic: Topic) -> None:
    route = Cluster([topic.endpoints], Security(), 10).route(topic.name)
    (broker,) = route.addresses()
    for chosen in ({"subscribe": topic.name}, {"subscribePattern": ".*"}):
        with pytest.raises(ReadError, match=r"this is the port of a broker: give that of a name server in .*endpoints"):
            read(endpoints=broker, **chosen)


def test_a_scheme_is_recognized() -> None:
    with pytest.raises(OptionError, match=r"has the address 'http://h:9876' with a scheme; write h:9876"):
        read(endpoints="http://h:9876", subscribe="T")


def test_a_group_without_dead_letters_is_named(topic: Topic, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "dead-letter", "nobody", "-n", topic.endpoints]) == 1
    said = capsys.readouterr().err
    assert "group 'nobody' has no dead letters, or does not exist: topic '%DLQ%nobody' is unknown" in said


def test_a_replay_to_itself_is_refused_before_spark_starts(
    topic: Topic, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("Spark starts")

    monkeypatch.setattr("martlet_spark.commands.replay.run_query", start)
    words = ["pipeline", "replay", topic.name, "-n", topic.endpoints, "--to", topic.name, "--checkpoint", "/nowhere"]
    assert main(words) == 2
    assert f"topic '{topic.name}' is replayed to itself" in capsys.readouterr().err


def test_a_closed_topic_is_not_read_as_an_empty_one(topic: Topic) -> None:
    with Admin(patient(topic.endpoints)) as admin:
        admin.create_topic(topic.name, queues=4, perm=2)
    with pytest.raises(ReadError, match=f"topic '{topic.name}' has no queue that may be read; its perm lacks 4"):
        read(**topic.options)


def test_a_read_only_topic_is_not_a_question_of_the_secret(topic: Topic) -> None:
    with Admin(patient(topic.endpoints)) as admin:
        admin.create_topic(topic.name, queues=4, perm=4)
    source = MartletDataSource({"endpoints": topic.endpoints, "topic": topic.name, "timeoutMs": "1s"})
    with pytest.raises(WriteError, match="its broker is down or the topic is read-only") as caught:
        source.writer(StructType([StructField("body", BinaryType())]), overwrite=False)
    assert "accessKey" not in str(caught.value)


@pytest.mark.parametrize(
    ("remark", "is_right"),
    [
        ("'ann' may not publish Orders", True),
        ("topic[Orders] is not writable; its perm is 4", False),
        ("the topic[Orders] reading message is forbidden; its perm lacks 4", False),
        ("the broker[a] sending message is forbidden", False),
        ("no plugin holds external transactions; add the plugin tx to plugins.enabled", False),
    ],
)
def test_only_a_user_without_rights_is_told_to_check_them(remark: str, is_right: bool) -> None:
    answer = AnswerFrame(1, ResponseCode.NO_PERMISSION, {}, remark, bytearray())
    assert ("accessKey" in rights_hint(answer)) == is_right


@pytest.mark.spark
def test_own_properties_are_those_that_a_copy_may_have(spark: object, topic: Topic) -> None:
    from pyspark.sql import SparkSession

    from martlet_spark import own_properties

    assert isinstance(spark, SparkSession)
    topic.send(4, keys="k")
    copy = Topic(topic.endpoints)
    read = spark.read.format("martlet").options(**topic.options, columns="key,body,properties").load()
    rows = read.withColumn("properties", own_properties())
    found = [row.properties for row in rows.collect()]
    assert sorted(each["number"] for each in found) == ["0", "1", "2", "3"]
    assert not {KEYS, UNIQ_KEY} & {name for each in found for name in each}
    rows.write.format("martlet").mode("append").options(endpoints=topic.endpoints, topic=copy.name).save()


def test_what_spark_says_at_each_start_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    noise = [
        "WARNING: Using incubator modules: jdk.incubator.vector",
        'Setting default log level to "WARN".',
        "To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).",
        "/x/pyspark/testing/utils.py:127: FutureWarning: PySpark does not yet fully support pandas >= 3.0.0.",
        "  require_minimum_pandas_version()",
    ]
    read, write = os.pipe()
    os.write(write, "\n".join(["Java is too old", *noise, "the disk is full", ""]).encode())
    os.close(write)
    pass_on(read)
    assert capsys.readouterr().err == "Java is too old\nthe disk is full\n"
