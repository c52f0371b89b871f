"""Chooses the member for each message: new messages, returned ones, and the effects of an acknowledgement."""
