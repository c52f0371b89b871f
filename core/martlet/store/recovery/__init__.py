"""Rebuilding indexes from the log: scans, repairs, indexing, and the inspection of a closed directory."""
