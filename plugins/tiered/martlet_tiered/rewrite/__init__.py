"""Rewriting files of the cold tier without the records of deleted topics."""
