"""The end of the log (RocketMQ's CommitLog): what is appended, committed, made durable and readable."""
