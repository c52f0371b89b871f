"""Delivery of readable records to clients: cursors, shared encodings, leases, shared groups and sessions."""
