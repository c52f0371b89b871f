"""The state of shared groups in the log: journal entries, their codec, and the state that a start computes."""
