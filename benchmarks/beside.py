"""Runs an in-process benchmark on this checkout and on others by turns, and compares the least of each line.

    python benchmarks/beside.py CHECKOUT [--rounds 8] -- sends.py --rounds 8

Each round runs this checkout's script in a process of its own for each, with the checkout's code (PYTHONPATH); so the
machine's moods meet both. Of each line ``NAME: least N us`` the least of all rounds is printed, and the ratio. A
checkout is, for example, what `git worktree add ../before c0897a7` makes.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LINE = re.compile(r"^(.+?): +least +([0-9.]+) us", re.MULTILINE)


def round_of(checkout: Path, words: list[str]) -> dict[str, float]:
    """Run the benchmark once with the code of *checkout*; return the least of each line in microseconds, by name."""
    paths = os.pathsep.join(map(str, (checkout / "core", *sorted((checkout / "plugins").iterdir()))))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(HERE / "benchmarks" / words[0]), *words[1:]]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {name: float(cost) for name, cost in LINE.findall(said)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("words", nargs="+", help="the script in benchmarks/ and its arguments, after --")
    options = parser.parse_args()
    checkouts = [options.checkout.resolve(), HERE]
    rounds = [[round_of(each, options.words) for each in checkouts] for _ in range(options.rounds)]
    for name in rounds[0][1]:
        before, now = (min(each[side].get(name, float("inf")) for each in rounds) for side in (0, 1))
        print(f"{name:32} {before:8.2f} us before, {now:8.2f} us now, {now / before:5.2f}")


if __name__ == "__main__":
    main()
