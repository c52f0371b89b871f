"""Files: segments, the page cache, checkpoints, and a disk that only records changes."""
