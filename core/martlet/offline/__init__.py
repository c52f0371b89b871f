"""Tools for a data directory that no broker uses: verify, repair, back up."""
