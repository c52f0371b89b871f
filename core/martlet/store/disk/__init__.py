"""Files: segments, the page cache, checkpoints, and disks that are not there."""
