"""Reading topics: what to read, how a task reads its ranges, and records into Arrow."""
