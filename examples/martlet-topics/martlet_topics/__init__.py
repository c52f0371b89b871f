"""A small protocol in the manner of MQTT: topic filters with wildcards, durable sessions, at-least-once delivery."""
