"""Delivery: from readable records to peers. Cursors, shared encodings, leases, shared groups and sessions."""
