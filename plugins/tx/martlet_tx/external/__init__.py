"""External transactions: named by their producers, staged where nobody reads them, committed once."""
