"""Reads from queues: whole batches, filtered ones, single messages."""
