"""The log on disk: one CommitLog, and indexes that can be rebuilt from it."""
