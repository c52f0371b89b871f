"""A program that reads a topic through Spark Connect, and prints what it read as JSON.

Arguments: name server, topic, and another topic that gets all messages twice, from a batch and from a stream.
"""

import json
import queue
import sys
import tempfile

from pyspark.sql import SparkSession

from martlet_spark import Lag, LagListener, configure


def main(endpoints: str, topic: str, copy: str) -> None:
    builder = configure(SparkSession.builder.remote("local[2]")).config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    options = {"endpoints": endpoints, "subscribe": topic}
    frame = spark.read.format("martlet").options(**options).load()
    spark.sql(
        f"CREATE TEMPORARY VIEW orders USING martlet OPTIONS (endpoints '{endpoints}', subscribe '{topic}', tags 'red')"
    )
    lags: queue.SimpleQueue[Lag] = queue.SimpleQueue()
    spark.streams.addListener(LagListener(lags.put))
    stream = spark.readStream.format("martlet").options(**options, startingOffsets="earliest").load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            stream.writeStream.format("memory")
            .queryName("read")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        lag = lags.get(timeout=240)
    sink = {"endpoints": endpoints, "topic": copy}
    frame.select("body").write.format("martlet").mode("append").options(**sink).save()
    with tempfile.TemporaryDirectory() as checkpoint:
        writing = stream.select("body").writeStream.format("martlet").options(**sink)
        writing.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    try:
        spark.read.format("martlet").options(**options, colums="body").load().collect()
    except Exception as error:  # what a user sees
        text = str(error)
    found = {
        "kind": type(spark).__module__,
        "batch": frame.where("queue = 1").count(),
        "view": spark.sql("SELECT count(*) FROM orders").collect()[0][0],
        "stream": spark.table("read").count(),
        "lag": [len(lag.queues), lag.total],
        "error": text,
    }
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
