"""Hold every conversation with a real RocketMQ broker and rewrite the transcripts.

python -m tests.transcripts.record
"""

import tempfile
from pathlib import Path

from tests.interop.rocketmq import Broker, NameServer
from tests.transcripts.conversations import CONVERSATIONS
from tests.transcripts.transcript import hold

TRANSCRIPTS = Path(__file__).parent / "files"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = NameServer(Path(folder) / "names")
        try:
            broker = Broker(Path(folder) / "broker", names.address)
            try:
                for title, steps in CONVERSATIONS.items():
                    lines = hold(steps, broker.address, names.address, broker.name)
                    (TRANSCRIPTS / f"{title}.txt").write_text("\n".join(lines) + "\n")
            finally:
                broker.stop()
        finally:
            names.stop()


if __name__ == "__main__":
    main()
