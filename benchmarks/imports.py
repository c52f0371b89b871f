"""How long programs without an event loop take to import what they need: processor time of new processes.

    python benchmarks/imports.py [MODULE...] [--runs 15]

A row has the median of the processor time in ms, and what is more than that of Python alone.
"""

import argparse
import os
import resource
import subprocess
import sys
from statistics import median

MODULES = (
    "martlet.records.layout",
    "martlet_remoting.wire.answers.messages",
    "martlet_remoting.wire.routes",
    "martlet_spark.cluster",
    "pyarrow",
    "martlet_spark.read.task",
)


def imported_ms(statement: str) -> float:
    """Return the processor time of a new process that runs *statement*."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    statements = {"Python alone": "pass", **{name: f"import {name}" for name in arguments.modules}}
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(arguments.runs):
        for name, statement in statements.items():
            times[name].append(imported_ms(statement))
    alone = median(times["Python alone"])
    for name, found in times.items():
        print(f"{name:36} {median(found):6.1f} ms {median(found) - alone:+7.1f}")


if __name__ == "__main__":
    main()
