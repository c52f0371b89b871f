"""Writes messages together with notes that timers are gone."""

import logging
from collections.abc import Sequence
from typing import final

from martlet.broker import Broker
from martlet.errors import Refused, StoreFailed
from martlet.message import Message
from martlet.state.journal import Journal
from martlet_timer.timers.journal_codec import ended, gone
from martlet_timer.timers.schedule import Timer

__all__ = ["TimerJournalWriter"]

log = logging.getLogger("martlet.timer")


@final
class TimerJournalWriter:
    """Appends messages and notes for the plugin loaded as *plugin*, whose stages do not get the messages again.

    ``is_refused`` says whether the store refused a delivery, and has accepted none since.
    """

    def __init__(self, broker: Broker, journal: Journal, plugin: str) -> None:
        self._broker = broker
        self._store = broker.store
        self._journal = journal
        self._plugin = plugin
        self.is_refused = False

    def append(self, messages: Sequence[Message], timers: Sequence[Timer], keys: Sequence[str] = ()) -> int:
        """Store *messages* and a note that *timers* are gone, all or none; return the end in the log.

        Args:
          keys: keys of repeated messages that end.

        Raises:
          Refused: the store refuses writes, or a message is refused.
          StoreFailed: the disk failed.
        """
        store = self._store
        store.committer.renew_clock()  # an older time would look like an early delivery
        notes = [(self._journal, gone(timers))]
        if keys:
            notes.append((self._journal, ended(keys)))
        self._broker.publish_all(messages, atomic=True, notes=notes, passed=self._plugin)
        end = store.appended
        try:
            store.committer.commit()
        except (Refused, StoreFailed) as error:
            # Other appends since the last commit are not stored either; their answers must not be sent.
            store.committer.fail_next(error)
            raise
        if self.is_refused:
            self.is_refused = False
            log.info("timers are delivered again")
        return end
