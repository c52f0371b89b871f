"""The end of the log (RocketMQ's CommitLog): appending records, committing them, making them durable and readable."""
