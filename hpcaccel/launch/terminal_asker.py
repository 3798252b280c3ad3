"""Questions on a terminal: choices with the arrow keys, through the library questionary."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from hpcaccel.errors import UserError

__all__ = ["TerminalAsker"]


class TerminalAsker:
    """Shows the questions in the terminal of stdin and stdout. Ctrl-C raises KeyboardInterrupt.

    Raises:
        UserError: stdin or stdout is not a terminal, or questionary is not installed.
    """

    def __init__(self) -> None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UserError(
                "the questions need a terminal, and standard input or output is not one: `hpcaccel config --default` "
                "writes a file without questions"
            )
        try:
            import questionary
        except ImportError:
            raise UserError(
                "the questions need the package questionary: pip install 'questionary>=2.0', or write a file without "
                "questions with `hpcaccel config --default`"
            ) from None
        self._library = questionary

    def choose(self, question: str, choices: Sequence[tuple[str, str]], default: str) -> str:
        items = [self._library.Choice(text, value=value) for value, text in choices]
        return str(self._library.select(question, choices=items, default=default).unsafe_ask())

    def agree(self, question: str, *, default: bool) -> bool:
        choices = [("yes", "yes"), ("no", "no")]
        return self.choose(question, choices, "yes" if default else "no") == "yes"

    def number(self, question: str, default: float, *, least: int = 1, whole: bool = True) -> float:
        def checked(text: str) -> bool | str:
            value = _number(text, whole=whole)
            kind = "a whole number" if whole else "a number"
            return True if value is not None and value >= least else f"{kind} of at least {least}"

        answer = self._library.text(question, default=f"{default:g}" if not whole else str(default), validate=checked)
        value = _number(str(answer.unsafe_ask()), whole=whole)
        assert value is not None
        return value

    def text(self, question: str, default: str = "", *, required: bool = True) -> str:
        def checked(text: str) -> bool | str:
            return True if text.strip() or not required else "an answer is needed"

        answer: Any = self._library.text(question, default=default, validate=checked).unsafe_ask()
        return str(answer).strip()


def _number(text: str, *, whole: bool) -> float | None:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
