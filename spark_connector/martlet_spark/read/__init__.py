"""Reading topics: plans batches, reads the ranges of a task, and decodes records into Arrow."""
