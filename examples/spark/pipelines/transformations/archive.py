"""The table ``archive`` gets each message of the topics once, by topic and day; each run appends what is new."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table(partition_cols=["topic", "date"])
def archive() -> DataFrame:
    options = {
        "endpoints": str(spark.conf.get("martlet.endpoints")),
        "subscribe": str(spark.conf.get("martlet.topics")),
        "startingOffsets": "earliest",
        "columns": "topic,broker,queue,offset,key,tag,body,properties,born_ts,store_ts,flag",
    }
    return spark.readStream.format("martlet").options(**options).load().selectExpr("*", "date(store_ts) AS date")
