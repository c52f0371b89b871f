"""Decides which messages the stages of plugins want.

Most messages concern no stage: a timer cares only about messages that have a property with their delay. So a stage
declares which properties or bits of sysFlag a message must have, and all other messages bypass it.
"""

from collections.abc import Sequence
from typing import final

from martlet.contracts import Stage
from martlet.errors import LocalProtocolError
from martlet.message import Message, find_property

__all__ = ["Stages"]


@final
class Stages:
    """The stages of all plugins in their order, each with the name of its plugin.

    ``every_message`` tells whether a stage wants every message. ``words`` are strings, and ``sys_flag`` are bits: no
    stage wants a message whose properties contain none of these strings and whose sysFlag has none of these bits.
    ``needles`` are the words as bytes.
    """

    def __init__(self, pairs: Sequence[tuple[str, Stage]] = ()) -> None:
        self.pairs = tuple(pairs)
        self._after: dict[str, Stages] = {}
        self.every_message = any(not stage.properties and not stage.sys_flag for _, stage in pairs)
        self._names = [tuple(name.encode() for name in stage.properties) for _, stage in pairs]
        names = {name for _, stage in pairs for name in stage.properties}
        # Any text that contains TIMER_DELAY_MS also contains DELAY.
        self.words = tuple(
            sorted(name for name in names if not any(name != other and other in name for other in names))
        )
        self.needles = tuple(word.encode() for word in self.words)
        self.sys_flag = 0
        for _, stage in pairs:
            self.sys_flag |= stage.sys_flag

    def may_want(self, message: Message) -> bool:
        """Return False if no stage wants *message*; True means only that a stage may want it."""
        return (
            self.every_message or bool(message.sys_flag & self.sys_flag) or self.may_want_properties(message.properties)
        )

    def may_want_any(self, messages: Sequence[Message]) -> bool:
        """Return False if no stage wants any of *messages*; True means only that a stage may want one."""
        if not self.pairs:
            return False
        if self.every_message or (self.sys_flag and any(each.sys_flag & self.sys_flag for each in messages)):
            return True
        return self.may_want_properties(b"".join([message.properties for message in messages]))

    def may_want_properties(self, properties: bytes) -> bool:
        """Return False if no stage wants a message with encoded *properties*, of one message or several joined."""
        # `in` raises and catches a TypeError internally, and a generator takes twice the time.
        for needle in self.needles:  # noqa: SIM110
            if properties.find(needle) >= 0:
                return True
        return False

    def wants(self, index: int, message: Message) -> bool:
        """Return whether stage *index* wants *message*."""
        stage = self.pairs[index][1]
        names = self._names[index]
        if not names and not stage.sys_flag:
            return True
        if message.sys_flag & stage.sys_flag:
            return True
        properties = message.properties
        for name in names:  # noqa: SIM110
            if properties.find(name) >= 0 and find_property(properties, name):
                return True
        return False

    def after(self, plugin: str) -> "Stages":
        """Return the stages after all those of *plugin*.

        Raises:
          LocalProtocolError: the plugin has no stage.
        """
        later = self._after.get(plugin)
        if later is None:
            places = [place for place, (name, _) in enumerate(self.pairs) if name == plugin]
            if not places:
                raise LocalProtocolError(f"plugin {plugin!r} has no stage that a message could have passed")
            later = self._after[plugin] = Stages(self.pairs[places[-1] + 1 :])
        return later
