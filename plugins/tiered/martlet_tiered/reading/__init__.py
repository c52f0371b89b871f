"""Reads of the cold tier: the index of its files, row groups rebuilt as records, and the look-ups."""
