"""The keys of actions, and the question before an action, answered with one key."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

__all__ = ["ACTION_KEYS", "ConfirmScreen"]

ACTION_KEYS: tuple[Binding, ...] = (
    Binding("s", "act('stop')", "Stop"),
    Binding("c", "act('cancel')", "Cancel"),
    Binding("r", "act('resume')", "Resume"),
    Binding("w", "act('save')", "Save"),
    Binding("u", "act('requeue')", "Requeue"),
    Binding("f", "act('finish')", "Finish"),
)
"""The keys of the actions on a run."""


class ConfirmScreen(ModalScreen[bool]):
    """Asks whether to do something; the result is True after ``y`` only.

    Args:
        question: such as ``Cancel gpt?``.
        follows: what happens after a yes.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y", "answer(True)", "Yes"),
        ("n,escape,q,enter", "answer(False)", "No"),
    ]

    def __init__(self, question: str, follows: str) -> None:
        super().__init__()
        self._question = question
        self._follows = follows

    def compose(self) -> ComposeResult:
        with Vertical(id="question"):
            yield Static(Text(self._question, style="bold"))
            yield Static(Text(self._follows))
            yield Static(Text.assemble(("y", "bold"), " yes     ", ("n", "bold"), " no"), id="answers")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
