"""The limits of sessions: bytes of filters and of data, for one session and for all together."""

from typing import final

from martlet.errors import Reason, Refused
from martlet.sessions.journal_codec import SessionState, filter_bytes
from martlet.sessions.state import SessionTable
from martlet.settings import DeliveryConfig

__all__ = ["SessionQuota"]


@final
class SessionQuota:
    """The room for filters and data; ``unstored_bytes`` is the size of sessions that end with their connections."""

    __slots__ = ("_config", "_note_bytes_max", "_table", "unstored_bytes")

    def __init__(self, table: SessionTable, note_bytes_max: int, config: DeliveryConfig) -> None:
        self.unstored_bytes = 0
        self._table = table
        self._note_bytes_max = note_bytes_max
        self._config = config

    @property
    def total_bytes(self) -> int:
        """The size of all sessions."""
        return self._table.bytes + self.unstored_bytes

    @property
    def data_bytes_max(self) -> int:
        """The maximum size of the data of one session."""
        return self._note_bytes_max // 4

    def check_filter(self, state: SessionState, topic_filter: str, options: bytes) -> None:
        """Raise `Refused` unless there is room for this filter in *state*."""
        size, config, limit = filter_bytes(topic_filter, options), self._config, self._note_bytes_max // 2
        if size > limit:
            raise Refused(Reason.ILLEGAL, f"a filter takes {size} bytes; shorten it to {limit}")
        replaced = state.filters.get(topic_filter)
        added_bytes = size - (filter_bytes(topic_filter, replaced) if replaced is not None else 0)
        if added_bytes > 0 and state.size + added_bytes > config.session_bytes_max:
            text = f"the session has too many filters; delivery.session_bytes_max is {config.session_bytes_max}"
            raise Refused(Reason.BUSY, text)
        total = self._table.bytes + self.unstored_bytes
        if added_bytes > 0 and total + added_bytes > config.sessions_bytes_max:
            text = f"all sessions take {total} bytes; delivery.sessions_bytes_max allows no more filters"
            raise Refused(Reason.BUSY, text)

    def check_data(self, data: bytes, state: SessionState | None) -> None:
        """Raise `Refused` unless there is room for *data* in *state*, or in a new session if that is None."""
        limit, config = self.data_bytes_max, self._config
        if len(data) > limit:
            raise Refused(Reason.ILLEGAL, f"the data of a session has {len(data)} bytes; shorten it to {limit}")
        replaced, size = (state.data, state.size) if state is not None else (b"", 0)
        added_bytes = len(data) - len(replaced)
        if added_bytes > 0 and size + added_bytes > config.session_bytes_max:
            text = f"the session has {size} bytes; delivery.session_bytes_max is {config.session_bytes_max}"
            raise Refused(Reason.BUSY, f"{text}, which leaves no room for {len(data)} bytes of data")
        total = self._table.bytes + self.unstored_bytes
        if added_bytes > 0 and total + added_bytes > config.sessions_bytes_max:
            text = f"all sessions take {total} bytes; delivery.sessions_bytes_max allows no more data"
            raise Refused(Reason.BUSY, text)
