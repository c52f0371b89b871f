"""Delivery of readable records: tails of topics, cursors and sweeps, and encodings that subscribers share."""
