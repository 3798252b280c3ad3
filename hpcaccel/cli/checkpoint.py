"""``checkpoint``: list, show, verify, convert and pin checkpoints."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.checkpoint_convert import convert
from hpcaccel.cli.options import Json, WholeSummaries
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.forward import there_or_here
from hpcaccel.cli.run_names import complete_checkpoint, complete_run

if TYPE_CHECKING:
    from hpcaccel.checkpoint_files.checksums import VerifyReport

__all__ = ["app"]

EXIT_DAMAGED = 1

app = typer.Typer(
    cls=WholeSummaries,
    no_args_is_help=True,
    rich_markup_mode=None,
)


_there_or_here = functools.partial(there_or_here, app, "checkpoint")

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="RUN (its newest checkpoint), RUN@STEP, or the path of a checkpoint.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]


@_there_or_here("list", effect="reads")
def list_(
    place: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run, or a directory of checkpoints.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ],
    json: Json = False,
) -> None:
    """List the checkpoints of a run or a directory, including those of checkpoint.watch."""
    from hpcaccel.submission.runs.checkpoints import find_place, find_watching_run
    from hpcaccel.view.checkpoint_tables import list_checkpoints, list_watched, print_checkpoints, put_aside

    watching = find_watching_run(place)
    directory = find_place(place) if watching is None else watching.checkpoints
    found = [*list_checkpoints(directory), *([] if watching is None else list_watched(watching))]
    if json:
        print_json([one.to_json() for one in found])
    elif found:
        print_checkpoints(found)
        for one in found:
            if one.problem is not None and not one.own:
                note(one.problem)
    else:
        note(f"no checkpoints in {directory} yet")
    if not json and (aside := put_aside(directory)):
        note(f"set aside (not used; hpcaccel clean may delete them): {', '.join(aside)}")


@_there_or_here("show", effect="reads")
def show(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor: dtype, shape, size, files.")] = False,
    json: Json = False,
) -> None:
    """Show the contents of a checkpoint and its resume guarantee."""
    from hpcaccel.checkpoint_files.contents import Contents
    from hpcaccel.submission.runs.checkpoints import find_checkpoint
    from hpcaccel.view.checkpoint_tables import list_checkpoints, parts, print_checkpoint, print_tensors

    path = find_checkpoint(checkpoint)
    contents = Contents(path)
    [one] = list_checkpoints(path)
    if json:
        document = {**one.to_json(), "files": one.manifest["files"]}
        document["parts"] = [
            {"name": part.name, "tensors": part.tensors, "bytes": part.bytes} for part in parts(contents)
        ]
        if tensors:
            document["tensors"] = {
                tensor.key: {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": len(tensor.chunks)}
                for tensor in contents.tensors.values()
            }
        print_json(document)
        return
    print_checkpoint(one, contents)
    if tensors:
        typer.echo()
        print_tensors(contents)


@_there_or_here("verify", effect="reads")
def verify(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|DIR|FILE",
            autocompletion=complete_checkpoint,
            help="A run (all its checkpoints), RUN@STEP, or a path: a checkpoint, a directory of checkpoints, or a "
            "weights file. Formats: hpcaccel, torch (DCP, torch.save), safetensors.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Check sizes, headers and all CRCs of checkpoints. Exit code 0: all good, 1: some damaged.

    Code contained in a file is never run.
    """
    from hpcaccel.checkpoint_files.verify import checkpoints_in, verify
    from hpcaccel.view.progress import Transfer

    reports = []
    for path in [path for place in places for path in checkpoints_in(_place(place))]:
        began = time.monotonic()
        with Transfer(f"verifying {path.name}") as transfer:
            report = verify(path, transfer.update)
        if not path.exists():
            note(f"{path} was deleted in the meantime: its run deletes old checkpoints")
            continue
        reports.append(report)
        if not json:
            _print_report(report, time.monotonic() - began)
    if json:
        print_json([report.to_json() for report in reports])
    if not all(report.good for report in reports):
        raise typer.Exit(EXIT_DAMAGED)


def _place(token: str) -> Path:
    """The path ``token`` if it exists; otherwise the checkpoint ``RUN@STEP``, or the checkpoint directory of a run."""
    from hpcaccel.submission.runs.checkpoints import find_checkpoint, find_place, is_checkpoint_of_run

    path = Path(token).expanduser().absolute()
    if path.exists():
        return path
    return find_checkpoint(token) if is_checkpoint_of_run(token) else find_place(token)


def _print_report(report: VerifyReport, seconds: float) -> None:
    from hpcaccel.core.formatting import clean, size

    speed = f"{size(report.bytes)} in {seconds:.1f} s"
    typer.echo(f"{'good' if report.good else 'DAMAGED'}  {clean(str(report.path))}  ({report.kind}, {speed})")
    for problem in report.problems:
        typer.echo(f"  {clean(problem)}")
    for text in report.notes:
        note(f"  note: {clean(text)}")


app.command()(convert)


@_there_or_here("pin")
def pin(
    checkpoint: Checkpoint,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Reason, stored with the pin.")] = "",
) -> None:
    """Pin a checkpoint, so that its run does not delete it when it becomes old."""
    from hpcaccel.checkpoint_files import pin
    from hpcaccel.submission.runs.checkpoints import find_checkpoint

    path = find_checkpoint(checkpoint)
    new = pin(path, why=why or "hpcaccel checkpoint pin")
    typer.echo(f"{path} is {'now' if new else 'already'} pinned")


@_there_or_here("unpin")
def unpin(checkpoint: Checkpoint) -> None:
    """Unpin a checkpoint, so that its run may delete it when it becomes old."""
    from hpcaccel.checkpoint_files import unpin
    from hpcaccel.submission.runs.checkpoints import find_checkpoint

    path = find_checkpoint(checkpoint)
    was = unpin(path)
    typer.echo(f"{path} is {'no longer' if was else 'not'} pinned")
