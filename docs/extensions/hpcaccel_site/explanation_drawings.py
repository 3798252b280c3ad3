"""The drawings of docs/explanation. ``make generated`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hpcaccel_site.drawing import BLUE, GREEN, GREY, ORANGE, RED, SOFT, Drawing

__all__ = ["explanation_drawings"]

FOLDER = Path(__file__).resolve().parents[2] / "explanation"


def explanation_drawings() -> dict[Path, str]:
    """The content of each drawing, by its path."""
    return {FOLDER / f"{name}.svg": draw().svg() for name, draw in _DRAWINGS.items()}


def stop_timeline() -> Drawing:
    """A preemption with grace time: the signals of four ranks, the agreement, the save, the requeue."""
    page = Drawing(
        780, 412, "Timeline of a stop: four ranks get SIGTERM at different moments and stop after the same step"
    )
    steps = [(96, 190, "step 41"), (190, 300, "step 42"), (300, 410, "step 43")]
    page.text(14, 56, "Slurm", size=12)
    page.text(236, 26, "SIGTERM", anchor="middle", color=RED)
    page.text(740, 26, "SIGKILL", anchor="middle", color=RED)
    page.box(236, 44, 504, 24, "grace time", color=ORANGE)
    page.line((740, 34), (740, 78), color=RED)
    page.text(14, 104, "batch step", size=12)
    page.text(236, 104, "gets no signal", color=SOFT)
    page.box(588, 91, 116, 26, "ledger, requeue", color=GREEN)
    page.line((557, 156), (594, 120), arrow=True)
    page.text(304, 138, "all ranks send their flags", anchor="end")
    page.text(406, 138, "all ranks read: stop")
    for rank, (arrives, sent) in enumerate([(222, "1"), (236, "1"), (250, "1"), (326, "0")]):
        y = 172 + 44 * rank
        page.text(14, y, f"rank {rank}", size=12)
        for start, end, text in steps:
            page.box(start, y - 14, end - start, 28, text, color=BLUE)
        page.box(410, y - 14, 120, 28, "save", color=GREEN)
        page.box(530, y - 14, 54, 28, "exit 85", color=GREY)
        page.signal(arrives, y - 8)
        page.flag(300, y, sent)
        page.flag(410, y, "1")
    for x in (300, 410, 530):
        page.line((x, 322), (x, 336), dashed=True)
    page.line((300, 336), (410, 336))
    page.text(355, 356, "all-reduce (bitwise or)\nduring step 43", anchor="middle")
    page.text(530, 348, "commit", anchor="middle", color=GREEN)
    page.signal(104, 401)
    page.text(118, 395, "SIGTERM arrives: the handler sets a flag")
    page.flag(466, 395, "1")
    page.text(482, 395, "flag of the rank at the end of the step")
    return page


def commit_files() -> Drawing:
    """The folder ``checkpoints`` in the five phases of a save, and what counts after a kill."""
    page = Drawing(
        800, 352, "Files of a checkpoint in the five phases of a save, and what counts after a kill in each phase"
    )
    old, new, files = (
        ["step_00000800/", "step_00001000/"],
        ".step_00001200.1.tmp/",
        ["rank_00000.bin", "rank_00001.bin"],
    )
    columns = [
        (14, 138, "begin", "rank 0", [*old, new]),
        (158, 138, "write", "every rank", [*old, new, *files]),
        (302, 138, "gather", "sizes and CRCs to rank 0", [*old, new, *files]),
        (446, 150, "publish", "rank 0", [*old, new, *files, "index.json", "COMMITTED"]),
        (602, 184, "retire", "rank 0", [".step_00000800.deleted.tmp/", old[1], "step_00001200/"]),
    ]
    for x, width, phase, who, lines in columns:
        page.box(x, 14, width, 28, phase, color=BLUE)
        page.text(x + width / 2, 58, who, size=10.5, color=SOFT, anchor="middle")
        page.box(x, 74, width, 186, filled=False)
        for number, name in enumerate(lines):
            indent = 6 if name.endswith("/") else 22
            color = ORANGE if name.startswith(".") else GREEN if name == "step_00001200/" else SOFT
            page.text(x + indent, 90 + 18 * number, name, size=10.5, color=color, mono=True)
    page.text(452, 222, "… renamed to", size=10.5)
    page.text(452, 242, "step_00001200/", size=10.5, color=GREEN, mono=True)
    page.line((559, 266), (559, 320), color=GREEN)
    page.text(559, 334, "rename: the commit", anchor="middle", color=GREEN)
    page.box(
        14, 278, 539, 30, "killed here: step_00001000 counts, the next save removes the rest", color=ORANGE, size=11
    )
    page.box(565, 278, 221, 30, "killed here: step_00001200 counts", color=GREEN, size=11)
    return page


def data_order() -> Drawing:
    """The batches of an epoch, dealt to four ranks before a checkpoint and to two ranks after it."""
    page = Drawing(
        760, 246, "Twelve batches of an epoch: eight go to four ranks before a checkpoint, four to two ranks after it"
    )
    colors = (BLUE, GREEN, ORANGE, RED)
    page.text(14, 50, "order of\nthe epoch", size=12)
    page.text(14, 122, "4 ranks", size=12)
    page.text(14, 182, "resumed on\n2 ranks", size=12)
    for number in range(12):
        x = 110 + 52 * number
        page.box(x, 36, 48, 28, f"b{number}")
        ranks, y = (4, 108) if number < 8 else (2, 168)
        rank = number % ranks
        page.line((x + 24, 66), (x + 24, y - 2), color=GREY)
        page.box(x, y, 48, 28, f"rank {rank}", color=colors[rank], size=11)
    for start, count, text, y in [
        (0, 4, "step 1", 144),
        (4, 4, "step 2", 144),
        (8, 2, "step 3", 204),
        (10, 2, "step 4", 204),
    ]:
        left, right = 112 + 52 * start, 104 + 52 * (start + count)
        page.line((left, y), (right, y))
        page.text((left + right) / 2, y + 12, text, anchor="middle")
    page.line((524, 22), (524, 222), color=RED, dashed=True)
    page.text(516, 226, "checkpoint: 8 batches are read", anchor="end", color=RED)
    return page


def restart_levels() -> Drawing:
    """Which process starts which, and what follows when one of them ends."""
    page = Drawing(
        780,
        236,
        "Slurm starts the batch step, which starts the supervisor, which starts the ranks; what follows their ends",
    )
    levels = [
        ("Slurm", GREY, "If the controller is away:\nthe ranks train on; a\nrequeue is tried again"),
        ("batch step", BLUE, "If it is killed: Slurm\nends the job. After a lost\nnode it starts it again"),
        ("supervisor", BLUE, "If it is killed: its ranks\nare ended, and another\nsupervisor is started"),
        ("ranks", GREEN, "If one fails: all start\nagain here, or the job is\nrequeued, or the run ends"),
    ]
    for number, (name, color, text) in enumerate(levels):
        x = 16 + 192 * number
        page.box(x, 30, 130, 40, name, color=color, size=13)
        page.text(x, 170, text)
        if number:
            page.line((x - 62, 50), (x - 4, 50), arrow=True)
            page.text(x - 33, 38, "starts", anchor="middle", color=SOFT)
            page.line((x + 50, 74), (x + 50, 100), (x - 112, 100), (x - 112, 76), dashed=True, arrow=True)
            page.text(x - 31, 114, "its end is seen by", anchor="middle", color=SOFT)
    return page


def sweep_workers() -> Drawing:
    """Two running workers and one in the queue, the journal above them, the trials' folders below."""
    page = Drawing(760, 420, "A sweep: workers share the journal, and each writes the folder of its own trial")
    page.box(14, 14, 732, 62, color=GREY)
    page.text(24, 30, "journal.jsonl", mono=True, size=12)
    lines = [
        "trial 3 complete: 2.93",
        "trial 4: claim, worker 0",
        "trial 5: claim, worker 1",
        "trial 6: claim, worker 2",
    ]
    for number, text in enumerate(lines):
        page.box(24 + 180 * number, 46, 172, 22, text, color=GREEN if number == 0 else BLUE, size=11)
    for number in range(3):
        x, trial = 14 + 248 * number, 4 + number
        middle, waits = x + 118, number == 2
        page.box(x, 122, 236, 176, color=GREY, filled=False, dashed=waits)
        page.text(
            x + 10, 138, f"worker {number}, {'preempted: in the queue' if waits else 'a task of the array'}", bold=True
        )
        page.box(middle - 75, 344, 150, 60, filled=False, color=ORANGE)
        page.text(middle, 360, f"trials/{trial}/", mono=True, size=12, anchor="middle")
        page.text(middle, 384, "ledger, metrics,\ncheckpoints", size=11, anchor="middle", color=SOFT)
        if waits:
            page.text(
                x + 10, 200, "Its claim on trial 6 holds.\nAfter the requeue it continues\nthe trial at its checkpoint."
            )
            page.line((middle, 302), (middle, 340), dashed=True)
            continue
        page.line((middle, 80), (middle, 118), both=True)
        page.text(middle + 8, 100, "claims, values", color=SOFT)
        for place, name in enumerate(
            ["tuner", "sweep worker", f"supervisor of trial {trial}", f"ranks of trial {trial}"]
        ):
            page.box(middle - 85, 156 + 36 * place, 170, 24, name, color=GREEN if place == 3 else BLUE)
            if place:
                page.line((middle, 144 + 36 * place), (middle, 154 + 36 * place))
        page.line((middle, 290), (middle, 340), arrow=True)
        page.text(middle + 8, 318, "writes", color=SOFT)
    return page


_DRAWINGS: Mapping[str, Callable[[], Drawing]] = {
    "stop-timeline": stop_timeline,
    "commit-files": commit_files,
    "data-order": data_order,
    "restart-levels": restart_levels,
    "sweep-workers": sweep_workers,
}
