"""Decodes stored records into Arrow tables, and encodes such tables back into the same bytes; needs no Spark."""
