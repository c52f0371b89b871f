"""The commands ``martlet mqtt ...``, which speak MQTT 5; commands for administrators need a broker of Martlet."""
