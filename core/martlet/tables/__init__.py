"""Topics and consumer groups: tables in RocketMQ's JSON files, stored next to the log."""
