"""Topics and consumer groups: the tables beside the log, in RocketMQ's JSON files."""
