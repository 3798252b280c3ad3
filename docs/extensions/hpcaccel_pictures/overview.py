"""The drawing of a run in the README: a file becomes a job, which is preempted, saves at one step, and continues."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

__all__ = ["overview_picture"]

WIDTH, HEIGHT = 920, 316
SPEC = (
    "name: gpt",
    "entrypoint:",
    "  script: train.py",
    "slurm:",
    "  nodes: 2",
    "  gpus_per_node: 2",
    "  time: 24:00:00",
)
RANKS = 4
STEP = 14
"""Width of a step, with the space behind it."""
LANES = 92
"""Where the lane of rank 0 begins, from the top."""
LANE = 26
FIRST, SECOND = 254, 648
"""Left edges of the two attempts."""
STEPS = 13
ALLOCATION = STEPS * STEP + 62
SIGNAL_STEP = STEPS - 3
"""The step of attempt 1 during which the signal arrives."""

STYLE = """\
.page{fill:#fff;stroke:#d1d9e0}.box{fill:#f6f8fa;stroke:#d1d9e0}.text{fill:#1f2328}.note{fill:#59636e}
.step{fill:#54aeff}.last{fill:#bf5700}.line{stroke:#8c959f;fill:none}.waits{stroke-dasharray:2 5}
.stop{stroke:#bf5700;fill:none}.warn{fill:#bf5700}
.good{fill:#1a7f37}.kept{fill:#dafbe1;stroke:#1a7f37}.back{stroke:#1a7f37;fill:none}
text{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.bold{font-weight:600}
@media (prefers-color-scheme:dark){
.page{fill:#0d1117;stroke:#3d444d}.box{fill:#161b22;stroke:#3d444d}.text{fill:#f0f6fc}.note{fill:#9198a1}
.step{fill:#1f6feb}.last{fill:#f0883e}.line{stroke:#656c76}.stop{stroke:#f0883e}.warn{fill:#f0883e}
.good{fill:#3fb950}.kept{fill:#12261e;stroke:#3fb950}.back{stroke:#3fb950}
}"""
LABEL = (
    "A spec file is submitted. Four ranks train on two nodes. At a preemption all of them stop at the same step and "
    "save a checkpoint. The job waits in the queue, and continues on other nodes at the next step."
)


def overview_picture() -> str:
    """The SVG, in the colours that the reader prefers: light or dark."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{LABEL}">',
        f"<title>{LABEL}</title>",
        f"<style>{STYLE}</style>",
        *_tips(),
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        *_spec(),
        *_attempt(FIRST, "attempt 1 on n1, n2", stops=True),
        *_signal(),
        *_queue(),
        *_attempt(SECOND, "attempt 2 on n3, n4", stops=False),
        *_checkpoint(),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, style: str = "text", anchor: str = "start") -> str:
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{placed}>{escape(text, quote=False)}</text>'


def _box(x: float, y: float, width: float, height: float, style: str = "box") -> str:
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def _tips() -> Iterator[str]:
    """The tips of arrows, in the colour of each style of lines."""
    for line, style in (("line", "note"), ("stop", "warn"), ("back", "good")):
        yield (
            f'<marker id="{line}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="{style}" d="M0 0L8 4L0 8z"/></marker>'
        )


def _arrow(path: str, style: str = "line") -> str:
    return f'<path class="{style}" stroke-width="1.6" marker-end="url(#{style.split()[0]})" d="{path}"/>'


def _bottom() -> float:
    """The lower edge of the lanes."""
    return LANES + RANKS * LANE


def _spec() -> Iterator[str]:
    yield _text(24, 40, "job.yaml", "text bold")
    yield _box(24, 52, 166, len(SPEC) * 18 + 18)
    for number, line in enumerate(SPEC):
        yield _text(36, 75 + 18 * number, line, "text code")
    yield _text(24, 224, "$ hpcaccel submit job.yaml", "text code")
    yield _text(24, 246, "checked in a second,", "note")
    yield _text(24, 264, "before it waits for hours", "note")
    middle = LANES + RANKS * LANE / 2
    yield _arrow(f"M196 {middle:g}H{FIRST - 8}")
    yield _text((196 + FIRST - 8) / 2, middle - 8, "Slurm", "note", "middle")


def _attempt(left: int, title: str, *, stops: bool) -> Iterator[str]:
    """An allocation with a lane of steps for each rank."""
    yield _text(left, 40, title, "text bold")
    yield _box(left, 72, ALLOCATION, _bottom() - 64)
    for rank in range(RANKS):
        top = LANES + rank * LANE
        yield _text(left + 8, top + 11, f"rank {rank}", "note")
        for step in range(STEPS):
            style = "last" if stops and step == STEPS - 1 else "step"
            yield f'<rect class="{style}" x="{_step_x(left, step)}" y="{top}" width="{STEP - 3}" height="14" rx="2"/>'
    if not stops:
        yield _text(left + ALLOCATION, 62, "completed ✓", "good bold", "end")


def _step_x(left: int, step: int) -> int:
    return left + 56 + step * STEP


def _signal() -> Iterator[str]:
    x = _step_x(FIRST, SIGNAL_STEP) + (STEP - 3) / 2
    yield _text(x - 6, 62, "preempted: SIGTERM", "warn", "end")
    yield f'<path class="stop" stroke-width="1.6" stroke-dasharray="3 3" d="M{x:g} 54V{_bottom() + 2:g}"/>'


def _queue() -> Iterator[str]:
    middle = LANES + RANKS * LANE / 2
    start, end = FIRST + ALLOCATION, SECOND
    yield _arrow(f"M{start + 8} {middle:g}H{end - 8}", "line waits")
    yield _text((start + end) / 2, middle - 10, "requeued, waits", "note", "middle")
    yield _text((start + end) / 2, middle + 20, "for nodes", "note", "middle")


def _checkpoint() -> Iterator[str]:
    """The checkpoint below the two attempts: written at the last step of the first one, loaded by the second one."""
    left, top, width = 432, 252, 232
    saves = _step_x(FIRST, STEPS - 1) + (STEP - 3) / 2
    loads = left + width + 28
    below = _bottom() + 12
    yield _box(left, top, width, 46, "kept")
    yield _text(left + width / 2, top + 20, "checkpoint of step 134", "text bold", "middle")
    yield _text(left + width / 2, top + 37, "a shard per rank, then one rename", "note", "middle")
    yield _arrow(f"M{saves:g} {below:g}V{top - 3}", "stop")
    yield _text(saves - 10, below + 14, "all ranks stop", "warn", "end")
    yield _text(saves - 10, below + 31, "at step 134 and save", "warn", "end")
    yield _arrow(f"M{left + width + 4} {top + 23}H{loads}V{below:g}", "back")
    for number, line in enumerate(("continues at the next step,", "with the same data order", "and random numbers")):
        yield _text(loads + 10, below + 28 + 17 * number, line, "good")
