"""The commands ``martlet mqtt ...``; they speak MQTT 5 with any broker, and those for administrators with Martlet."""
