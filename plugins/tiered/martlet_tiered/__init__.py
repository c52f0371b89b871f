"""The cold tier: ranges of the log as Parquet files of a Delta table, in an object store or a local directory."""
