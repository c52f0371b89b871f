"""The table ``stats`` has counts, sizes and latencies per minute, topic and tag; each run computes it again."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from martlet_spark.pipelines.stats import message_stats

spark = SparkSession.active()


@dp.materialized_view
def stats() -> DataFrame:
    endpoints, topics = str(spark.conf.get("martlet.endpoints")), str(spark.conf.get("martlet.topics"))
    return message_stats(spark, {"endpoints": endpoints, "subscribe": topics}, window_s=60)
