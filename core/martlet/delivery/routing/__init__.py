"""Which receivers want a record: topic filters, selections, and the division of a batch among them."""
