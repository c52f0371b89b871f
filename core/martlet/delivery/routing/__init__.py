"""Finds the receivers of a record: topic filters, selections, and the division of a batch among receivers."""
