"""The bytes of records and of queue entries, for brokers, clients and readers of the log; needs no event loop."""
