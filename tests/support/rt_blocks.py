"""The fenced code blocks of Markdown files, and the commands with which a test runs them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\s*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    file: str  # relative to the repository's root
    line: int  # number of the block's first line of code
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The block's lines without comments. A line that ends in a backslash is joined with the next line."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]

    @property
    def is_server(self) -> bool:
        """True if the block starts the server and runs until Ctrl-C."""
        return self.commands[0].split()[:2] == ["make", "run"]

    @property
    def is_engine(self) -> bool:
        """True if the block starts an engine without a manifest, which runs until Ctrl-C."""
        return " serve" in self.commands[-1] and self.commands[-1].startswith(".venv/bin/")

    @property
    def is_client(self) -> bool:
        """True if the block sends requests to a server that another block starts."""
        return "127.0.0.1:800" in self.text

    @property
    def installs(self) -> bool:
        """True if the block installs packages that `.venv` lacks. Such a block runs in `make client-tests`."""
        return self.text.startswith("# pip install ")


def blocks_of(root: Path, path: Path) -> list[Block]:
    """The fenced blocks of one file, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            file=str(path.relative_to(root)),
            line=text.count("\n", 0, match.start(2)) + 1,
            language=match[1],
            text=match[2],
        )
        for match in _FENCE.finditer(text)
    ]


def runnable(command: str) -> str:
    """The command as a test runs it.

    A target of make is only expanded (`make -n`): its commands may run this suite, change the environment or measure
    for minutes. A benchmark only parses its flags. For this the command ends with `--help`, and an unknown flag
    before `--help` is still refused.
    """
    words = command.split()
    if words[0] == "make" and words[1:2] != ["run"]:
        return "make -n " + " ".join(words[1:])
    if is_benchmark(command):
        return command + " --help"
    return command


def is_benchmark(command: str) -> bool:
    """True for `rayloom-engine bench` with flags that the shell does not change."""
    program, *words = command.split()
    return program.endswith("rayloom-engine") and words[:1] == ["bench"] and not set("$`|<>&;*?") & set(command)


def install_stand_in_curl(folder: Path) -> Path:
    """Writes a `curl` for machines without curl.

    It has the features that the pages' examples need. Returns its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "curl"
    script.write_text(f"#!{sys.executable}\n{_CURL}")
    script.chmod(0o755)
    return folder


_CURL = """
import argparse
import sys
import urllib.request

parser = argparse.ArgumentParser()
for flag in ("-s", "-S", "-N"):
    parser.add_argument(flag, action="store_true")
parser.add_argument("-H", action="append", default=[])
parser.add_argument("-d")
parser.add_argument("url")
args = parser.parse_args()
headers = dict(header.split(": ", 1) for header in args.H)
request = urllib.request.Request(args.url, data=args.d and args.d.encode(), headers=headers)
with urllib.request.urlopen(request, timeout=60) as response:
    sys.stdout.write(response.read().decode())
"""
