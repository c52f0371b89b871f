"""The state of shared groups in the log: notes in a journal, their codec, and the state that a start computes."""
