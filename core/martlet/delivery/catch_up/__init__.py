"""Sweeps through the log for cursors that are behind, until they meet the tail."""
