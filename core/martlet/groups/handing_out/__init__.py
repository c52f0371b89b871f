"""Which member gets which message: new ones, returned ones, and what follows an acknowledgement."""
