"""A recorded terminal session, in the format of asciinema (asciicast v2): its programs can play it, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OUTPUT", "TYPED", "Recording"]

OUTPUT = "o"
TYPED = "m"
"""A marker: what somebody else types at this moment, in a terminal that is not shown."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a terminal printed, and when."""

    columns: int
    rows: int
    title: str
    events: tuple[tuple[float, str, str], ...]
    """Seconds since the start, ``OUTPUT`` or ``TYPED``, text."""

    @classmethod
    def load(cls, path: Path) -> Recording:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        values = json.loads(head)
        events = ((float(time), str(kind), str(text)) for time, kind, text in map(json.loads, lines))
        return cls(columns=values["width"], rows=values["height"], title=values["title"], events=tuple(events))

    def save(self, path: Path) -> None:
        head = {"version": 2, "width": self.columns, "height": self.rows, "title": self.title}
        lines = [json.dumps(head), *(json.dumps(event, ensure_ascii=False) for event in self.events)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def with_replaced(self, names: Mapping[str, str]) -> Recording:
        """The recording with other names in place of this machine's.

        Args:
            names: what to write for each name; longer names are replaced first.

        Raises:
            ValueError: a name is still in the output, divided between two events.
        """
        events = []
        for time, kind, text in self.events:
            for name in sorted(names, key=len, reverse=True):
                text = text.replace(name, names[name])
            events.append((time, kind, text))
        whole = "".join(text for _, kind, text in events if kind == OUTPUT)
        if left := [name for name in names if name in whole]:
            raise ValueError(f"{left[0]!r} is divided between two events of the recording: record again")
        return Recording(columns=self.columns, rows=self.rows, title=self.title, events=tuple(events))
