"""One program of all parts: what a start builds, saves and says."""
