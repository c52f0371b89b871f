"""Reads ``expressions.txt``; the comment at its top explains the format."""

import re
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r" (?P<mark>[ +xo-])(?P<verdict>[TFU]|!(?P<at>\d+))[ \t](?P<text>.*)", re.DOTALL)
VERDICTS = {"T": True, "F": False, "U": None}


@dataclass(frozen=True, slots=True)
class Case:
    line: int
    text: str
    properties: tuple[tuple[str, str], ...]
    verdict: bool | None
    refused_at: int  # the character that the refusal points at, from 1; 0 where the expression is valid
    mark: str

    @property
    def rocketmq_refuses(self) -> bool:
        return self.mark == "x" or (self.refused_at > 0 and self.mark == " ")

    @property
    def rocketmq_selects(self) -> bool:
        return self.mark == "+" or (self.mark == " " and self.verdict is True)

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


def cases() -> list[Case]:
    found: list[Case] = []
    properties: tuple[tuple[str, str], ...] = ()
    lines = (Path(__file__).parent / "expressions.txt").read_text().split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("given "):
            pairs = (item.split("=", 1) for item in line.removeprefix("given ").split("|"))
            properties = tuple((name, text) for name, text in pairs)
        elif line and not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match is not None, f"line {number} has another format"
            verdict = VERDICTS.get(match["verdict"])
            found.append(Case(number, match["text"], properties, verdict, int(match["at"] or 0), match["mark"]))
    return found
