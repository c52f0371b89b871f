"""State that all connections share: counters and registries, storing, replies, temporary destinations."""
