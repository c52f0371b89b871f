"""Show why messages became dead letters of a consumer group, export them, and send those of retries again.

python examples/spark/dead_letters.py 127.0.0.1:9876 billing /data/letters /data/resent-checkpoint
"""

import sys

from pyspark.sql import SparkSession

from martlet_spark.pipelines.dead_letters import Letters, Resend, causes, read_dead_letters, resend
from martlet_spark.pipelines.session import open_session


def main(spark: SparkSession, name_server: str, group: str, path: str, checkpoint: str) -> None:
    letters = read_dead_letters(spark, {"endpoints": name_server}, group)
    causes(letters).select("origin_topic", "tag", "way", "deliveries", "letters").show()
    letters.write.parquet(path)
    report = resend(spark, {"endpoints": name_server}, Letters(group, where="way = 'retries'"), Resend(checkpoint))
    print(f"resent {report.counted['sent']} of {report.messages} letters")


if __name__ == "__main__":
    main(open_session("dead letters"), *sys.argv[1:])
