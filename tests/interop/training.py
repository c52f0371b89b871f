"""Write the class archives of RocketMQ's servers and of its Java clients: python -m tests.interop.training."""

import tempfile
from pathlib import Path

from . import class_archives, fetch, java, rocketmq


def main() -> None:
    servers = [rocketmq.archive(program) for program in (rocketmq.NAME_SERVER, rocketmq.BROKER)]
    archives = [*servers, *map(java.archive, fetch.CLIENT_VERSIONS)]
    with class_archives.make(*archives) as needed, tempfile.TemporaryDirectory() as folder:
        if needed:
            _run(Path(folder))
    print(f"class archives: {fetch.cache()}/classes-*")


def _run(folder: Path) -> None:
    """Run the servers, and let each client do a little of everything."""
    names = rocketmq.NameServer(folder / "names")
    try:
        broker = rocketmq.Broker(folder / "broker", names.address)
        try:
            for version in fetch.CLIENT_VERSIONS:
                _use(version, folder / version, names.address)
        finally:
            broker.stop()
    finally:
        names.stop()


def _use(version: str, folder: Path, name_server: str) -> None:
    jvm = java.Jvm(version, folder)
    try:
        clients = java.Java(jvm, name_server)
        topic = f"Training-{version.replace('.', '-')}"
        clients.mqadmin("updateTopic", "-c", "DefaultCluster", "-t", topic)
        consumer = clients.push("training", topic)
        clients.producer().send(java.message(topic, "body", tags="tag", keys="key"))
        consumer.wait(1)
        clients.mqadmin("topicStatus", "-t", topic)
        clients.close()
    finally:
        jvm.stop()


if __name__ == "__main__":
    main()
