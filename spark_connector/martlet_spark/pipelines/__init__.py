"""The data pipelines on topics; each takes a Spark session, of one machine or of a cluster."""
