"""State that all connections share: counters and registries, retained messages, storing, replies."""
