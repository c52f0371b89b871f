"""What clients read from the answers of brokers and name servers: needs no event loop."""
