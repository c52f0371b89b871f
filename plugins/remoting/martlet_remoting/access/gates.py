"""The gates through which the requests of one connection act."""

from martlet.access import Gate
from martlet.broker import Broker
from martlet.contracts import Identity, Peer
from martlet.errors import Refused
from martlet_remoting.wire.packets import Command

__all__ = ["ConnectionGates"]


class ConnectionGates:
    """The gate of a connection's own identity, and that of the identity that signed its last signed request."""

    __slots__ = ("_broker", "_signed_gate", "own_gate", "peer")

    def __init__(self, broker: Broker, peer: Peer) -> None:
        self.peer = peer
        self.own_gate: Gate | None = None  # of the connection's own identity, from the first request on
        self._broker = broker
        self._signed_gate: Gate | None = None

    def gate(self, command: Command) -> Gate:
        """Return the gate of the identity that signed *command*, else of the connection's own identity."""
        identity = command.identity
        return self.connection_gate() if identity is None else self.gate_of(identity)

    def gate_of(self, identity: Identity) -> Gate:
        """Return the gate of *identity*, which signed a request. Raises `Refused` if it has too many connections."""
        if self._signed_gate is None or self._signed_gate.identity != identity:
            broker, origin = self._broker, self.peer.login_origin()
            self._signed_gate = broker.gate(identity, origin, self.peer)
            broker.authentication.note_signer(identity, origin)
        return self._signed_gate

    def connection_gate(self) -> Gate:
        """Return the gate of the connection's own identity.

        Raises:
          Refused: it must prove an identity, or this one has too many connections.
        """
        if self.own_gate is None:
            broker, peer = self._broker, self.peer
            peer.identity = broker.authentication.identify(peer)
            self.own_gate = broker.gate(peer.identity, peer.login_origin(), peer)
        return self.own_gate

    def gate_of_run(self, signer: Identity | None) -> Gate | None:
        """Return the gate for requests of *signer*, None for the connection itself; None if each must be refused."""
        try:
            return self.connection_gate() if signer is None else self.gate_of(signer)
        except Refused:
            return None
