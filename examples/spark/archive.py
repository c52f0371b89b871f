"""Archive what is new in topics as Parquet files, each message exactly once.

python examples/spark/archive.py 127.0.0.1:9876 Orders /data/archive
"""

import sys

from pyspark.sql import SparkSession

from martlet_spark.pipelines.archive import Archive, archive
from martlet_spark.pipelines.session import open_session


def main(spark: SparkSession, name_server: str, topics: str, path: str) -> None:
    report = archive(spark, {"endpoints": name_server, "subscribe": topics}, Archive(path))
    print(f"archived {report.messages} messages; {report.behind} came meanwhile")
    spark.read.parquet(path).groupBy("topic", "date").count().orderBy("topic", "date").show()


if __name__ == "__main__":
    main(open_session("archive"), *sys.argv[1:])
