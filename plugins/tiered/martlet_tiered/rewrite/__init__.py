"""Rewriting files of the cold tier: without the records of deleted topics, and many small ones as one."""
