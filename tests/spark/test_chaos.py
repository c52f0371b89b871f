"""Five kills of a query between topics of two brokers, on two executors: each message arrives once.

Then the pipelines, in the same session: nothing of them assumes that driver and tasks are one process.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.interop.process import Process, eventually, until

from . import chaos_query
from .clusters import Cluster, Messages, batch_of
from .pipeline_process import kill_session
from .test_sink_several_brokers import brokers_of

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.timeout(1100)]
MESSAGES = 1000
RUN_LIMIT_S = 1000.0  # for one that hangs; on two busy cores one has taken 150 s


@contextmanager
def running(folder: Path, number: int, environment: Mapping[str, str], *words: str) -> Iterator[Process]:
    """Run the query; end all of its processes at the end."""
    program = [sys.executable, chaos_query.__file__, str(folder), *words]
    process = Process(program, folder / f"query-{number}.log", environment)
    try:
        yield process
    finally:
        eventually(lambda: kill_session(process.pid))
        process.child.wait()


def run(folder: Path, *words: str) -> list[str]:
    """Start the query again and again until it ends well; return the last output of the runs that failed."""
    environment = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    failed: list[str] = []
    for number in range(1, 6):
        with running(folder, number, environment, *words) as process:
            code = until(process.child.poll, RUN_LIMIT_S, 0.1)
            log = process.output()[-3000:]
        if code == 0:
            return failed
        assert code is not None, f"the query does not end; its last output:\n{log}"
        assert any((folder / f"killed-{kill}").exists() for kill in (3, 4)), f"the query failed:\n{log}"
        failed.append(log)
    raise AssertionError(f"the query never ended well; its last output:\n{log}")


@dataclass(frozen=True)
class Ran:
    """What is left of the query: its topics, its folder, and the last words of runs that failed."""

    source: Messages
    target: Messages
    copy: Messages
    folder: Path
    failed: list[str]


@pytest.fixture(scope="module")
def ran(pair: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    source, target, copy = (Messages(pair.endpoints, ["a", "b"]) for _ in range(3))
    source.send(MESSAGES // 4)
    folder = tmp_path_factory.mktemp("chaos")
    failed = run(folder, pair.endpoints, source.name, target.name, copy.name)
    return Ran(source, target, copy, folder, failed)


def test_a_query_from_topic_to_topic_survives_five_kills(ran: Ran) -> None:
    happened = [name for kill, name in enumerate(chaos_query.KILLS) if (ran.folder / f"killed-{kill}").exists()]
    assert happened == list(chaos_query.KILLS)
    assert len(ran.failed) == 2, "\n".join(ran.failed)  # it is killed itself twice
    assert sorted(batch_of(ran.target)) == sorted(ran.source.bodies)
    assert len(brokers_of(ran.target)) == 2


def test_pipelines_run_on_executors_of_their_own(ran: Ran) -> None:
    found = json.loads((ran.folder / "pipelines.json").read_text())
    assert found == dict.fromkeys(("archived", "replayed", ran.target.name, ran.copy.name), MESSAGES)
    archived = DeltaTable(str(ran.folder / "archive")).to_pyarrow_table()
    assert sorted(archived["body"].to_pylist()) == sorted(ran.source.bodies)
    assert sorted(batch_of(ran.copy)) == sorted(ran.source.bodies)
