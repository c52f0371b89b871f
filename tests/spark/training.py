"""Write the class archive of Spark: python -m tests.spark.training."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.broker_process import broker_process
from tests.client.patient import PATIENCE_S, patient
from tests.interop import class_archives

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_spark import configure

from . import java_options

TOPIC = "Training"


def main() -> None:
    archive = java_options.archive()
    with class_archives.make(archive) as needed, tempfile.TemporaryDirectory() as folder:
        if needed:
            java_options.set_options()
            _run(Path(folder))
    print(f"class archive: {archive}")


def _run(folder: Path) -> None:
    """Run a batch and a stream, in a process whose JVM has ended when it ends."""
    with broker_process(folder / "data") as endpoints:
        with Admin(patient(endpoints)) as admin:
            admin.create_topic(TOPIC, queues=1)
        with Producer(patient(endpoints), "training", send_timeout_s=PATIENCE_S) as producer:
            for number in range(20):
                producer.send(Message(TOPIC, f"body {number}".encode()))
        words = [sys.executable, "-m", __spec__.name, str(folder), endpoints]
        ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            last = "\n".join(ended.stderr.splitlines()[-40:])
            raise SystemExit(f"Spark ended with {ended.returncode}:\n{last}")


def use(folder: str, endpoints: str) -> None:
    from pyspark.sql import SparkSession, functions

    builder = SparkSession.builder.master("local[1]").appName("martlet-training")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        **java_options.INTERPRETED,
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
    }.items():
        builder = builder.config(name, value)
    spark = configure(builder).getOrCreate()
    options = {"endpoints": endpoints, "subscribe": TOPIC}
    rows = spark.read.format("martlet").options(**options).load()
    rows.groupBy("queue").agg(functions.count("*"), functions.max("offset")).orderBy("queue").collect()
    stream = spark.readStream.format("martlet").options(**options, startingOffsets="earliest").load()
    written = stream.select("body").writeStream.format("martlet").options(endpoints=endpoints, topic=f"{TOPIC}-copy")
    written.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    use(*sys.argv[1:]) if len(sys.argv) > 1 else main()
