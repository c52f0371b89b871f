"""The files of the cold tier: records as Parquet with a footer that tells where each queue is, and the keys in them."""
