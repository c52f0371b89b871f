"""What handlers of sends share: constant parts of answers and records, and the sends of a round, stored together."""
