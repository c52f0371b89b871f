"""A process ends at once, and without the clean-up of the interpreter, while a library is at work in a thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, time
import trio
from martlet.errors import Refused
from martlet.runtime.io_threads import IoThreads
from martlet.runtime.live_calls import end_process

async def work():
    threads = IoThreads("the store", deadline_s=0.05)
    try:
        await threads.run(lambda: time.sleep({seconds}))
    except Refused as refused:
        print(refused)

atexit.register(print, "cleaned up")
trio.run(work)
print("ends", flush=False)
end_process(7)
sys.exit(8)
"""


@pytest.mark.parametrize(
    ("seconds", "code", "told"),
    [
        (0, 8, "ends\ncleaned up\n"),
        (3600, 7, "the store did not answer within 0.05 s; try again\nends\n"),
    ],
)
def test_a_process_ends_at_once_while_a_call_is_under_way(seconds: int, code: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(seconds=seconds)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, told, "")
