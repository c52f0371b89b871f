"""The name server: which brokers there are, and what topics they serve."""
