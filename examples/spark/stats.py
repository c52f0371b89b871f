"""Count and measure the messages of topics per minute and tag, and draw that on a page of HTML.

python examples/spark/stats.py 127.0.0.1:9876 Orders orders.html
"""

import sys

from pyspark.sql import SparkSession

from martlet_spark.pipelines.plots import charts_of, plot
from martlet_spark.pipelines.session import open_session
from martlet_spark.pipelines.stats import message_stats, per_topic


def main(spark: SparkSession, name_server: str, topics: str, page: str) -> None:
    found = message_stats(spark, {"endpoints": name_server, "subscribe": topics}, window_s=60).persist()
    found.orderBy("window", "topic", "tag").select("window", "tag", "messages", "bytes", "latency_ms_p99").show()
    rows = per_topic(found).orderBy("window").collect()
    plot(charts_of(row.asDict() for row in rows), page, topics)
    found.unpersist()


if __name__ == "__main__":
    main(open_session("stats"), *sys.argv[1:])
