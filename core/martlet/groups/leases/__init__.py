"""Leases: the holder of each message, and their deadlines; pure logic without a clock."""
