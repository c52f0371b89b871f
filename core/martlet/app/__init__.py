"""The program of a broker: the parts that a start builds, the tables that it saves, and its log."""
