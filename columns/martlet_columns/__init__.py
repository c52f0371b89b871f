"""Columns of stored records: Arrow tables of records, and their very bytes made again of these; needs no Spark."""
