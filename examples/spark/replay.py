"""Send the messages of an archive to a topic again, each exactly once, at no more than 1,000 a second.

python examples/spark/replay.py 127.0.0.1:9876 /data/archive Orders.again /data/replay-checkpoint
"""

import sys

from pyspark.sql import SparkSession

from martlet_spark.pipelines.replay import Replay, replay
from martlet_spark.pipelines.session import open_session


def main(spark: SparkSession, name_server: str, archive: str, topic: str, checkpoint: str) -> None:
    report = replay(spark, archive, {"endpoints": name_server}, Replay(topic, checkpoint, rate=1000))
    print(f"replayed {report.messages} messages")


if __name__ == "__main__":
    main(open_session("replay"), *sys.argv[1:])
