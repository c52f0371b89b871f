"""From a log to what is derived of it: scans, repairs, indexing, and the look into a closed directory."""
