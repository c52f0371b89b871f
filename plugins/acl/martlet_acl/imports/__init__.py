"""Users and rules from the files of RocketMQ, Mosquitto and RabbitMQ; no input or output.

Each function takes a text and returns an `Imported`: nobody may do more with it than with the file, and a remark names
each line that cannot be said in rules.
"""
