"""Uploading the log to the cold tier: ranges of positions become files, and a commit of the table."""
