"""Certificates of ports: when they expire, and those that Martlet makes for ports that have none."""
