"""A Kafka broker, one node with KRaft, and the jars of Spark's Kafka source; fetched by Maven on first use."""

import subprocess
from pathlib import Path

from benchmarks.brokers import WORK, Process, free_port, need, wait_port

__all__ = ["Kafka", "jars"]

CLUSTER_ID = "bWFydGxldC1iZW5jaC1rYQ"


def jars(profile: str) -> list[Path]:
    """Return the jars of *profile* of the POM: "broker" or "source"."""
    folder = WORK / f"kafka-{profile}"
    if not (folder / "complete").exists():
        command = [need("mvn"), "-q", "-B", "-f", str(Path(__file__).parent / "pom.xml"), "-P", profile]
        words = ("dependency:copy-dependencies", f"-DoutputDirectory={folder}", "-DincludeScope=runtime")
        subprocess.run([*command, *words], check=True)
        (folder / "complete").touch()
    return sorted(folder.glob("*.jar"))


class Kafka:
    """A Kafka broker on loopback with default settings."""

    def __init__(self, data: Path, partitions: int) -> None:
        port, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        data.mkdir(parents=True)
        config = data / "server.properties"
        config.write_text(
            "process.roles=broker,controller\nnode.id=1\ncontroller.listener.names=CONTROLLER\n"
            f"controller.quorum.voters=1@127.0.0.1:{controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
            f"log.dirs={data}/log\nnum.partitions={partitions}\noffsets.topic.replication.factor=1\n"
            "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\n"
        )
        run = [need("java"), "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:-UsePerfData", f"-Dkafka.logs.dir={data}"]
        run += ["-cp", str(WORK / "kafka-broker" / "*") if jars("broker") else ""]
        storage = [*run, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(config)]
        subprocess.run(storage, check=True, capture_output=True)
        self.process = Process([*run, "kafka.Kafka", str(config)], data / "broker.log")
        wait_port(port)

    def close(self) -> None:
        self.process.stop()
