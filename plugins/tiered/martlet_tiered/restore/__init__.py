"""What a new machine needs beside the table: the state of a broker, and a data directory made from both."""
