"""``checkpoint``: looking at checkpoints, checking them, keeping them, and turning them into other formats."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpcaccel.cli.completion import checkpoint_names, run_names
from hpcaccel.cli.options import Json
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.dispatch import meant_cluster
from hpcaccel.cli.remote.forward import there_or_here
from hpcaccel.cli.root_help import WholeSummaries
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.checkpoint_files.checksums import Report

__all__ = ["app"]

EXIT_DAMAGED = 1

app = typer.Typer(
    cls=WholeSummaries,
    help="List, show, verify, convert and pin checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


_there_or_here = functools.partial(there_or_here, app, "checkpoint")

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="RUN (its newest checkpoint), RUN@STEP, or the path of a checkpoint.",
        autocompletion=checkpoint_names,
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
            autocompletion=run_names,
        ),
    ],
    json: Json = False,
) -> None:
    """List the checkpoints of a run or a directory."""
    from hpcaccel.submission.checkpoints import find_place
    from hpcaccel.view.checkpoint_tables import list_checkpoints, print_checkpoints, put_aside

    directory = find_place(place)
    found = list_checkpoints(directory)
    if json:
        print_json([one.to_json() for one in found])
    elif found:
        print_checkpoints(found)
        for one in found:
            if one.problem is not None:
                note(one.problem)
    else:
        note(f"there are no checkpoints in {directory} yet")
    if not json and (aside := put_aside(directory)):
        note(f"put aside, and neither used nor deleted: {', '.join(aside)}")


@_there_or_here("show", effect="reads")
def show(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor: dtype, shape, size, files.")] = False,
    json: Json = False,
) -> None:
    """Show what a checkpoint holds, and what it promises."""
    from hpcaccel.checkpoint_files.contents import Contents
    from hpcaccel.submission.checkpoints import find_checkpoint
    from hpcaccel.view.checkpoint_tables import list_checkpoints, parts, print_checkpoint, print_tensors

    path = find_checkpoint(checkpoint)
    contents = Contents(path)
    [one] = list_checkpoints(path)
    if json:
        said = {**one.to_json(), "files": one.manifest["files"]}
        said["parts"] = [{"name": part.name, "tensors": part.tensors, "bytes": part.bytes} for part in parts(contents)]
        if tensors:
            said["tensors"] = {
                tensor.key: {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": len(tensor.chunks)}
                for tensor in contents.tensors.values()
            }
        print_json(said)
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
            metavar="RUN|DIR|FILE...",
            autocompletion=checkpoint_names,
            help="A run (all its checkpoints), RUN@STEP, or the path of a checkpoint, of a directory of several, or of "
            "a file of weights; hpcaccel's, torch's (DCP, torch.save) and safetensors.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Read checkpoints from end to end and compare every byte with its CRC. Exit code 0 good, 1 damaged.

    No code in a file is ever run.
    """
    from hpcaccel.checkpoint_files.verify import checkpoints_in, verify
    from hpcaccel.view.transfer import Transfer

    reports = []
    for path in [path for place in places for path in checkpoints_in(_place(place))]:
        began = time.monotonic()
        with Transfer(f"verifying {path.name}") as transfer:
            report = verify(path, transfer.tell)
        if not path.exists():
            note(f"{path} has been deleted meanwhile, as its run does with old ones")
            continue
        reports.append(report)
        if not json:
            _tell(report, time.monotonic() - began)
    if json:
        print_json([report.to_json() for report in reports])
    if not all(report.good for report in reports):
        raise typer.Exit(EXIT_DAMAGED)


def _place(token: str) -> Path:
    """Anything at that path, else what the name of a run means."""
    from hpcaccel.submission.checkpoints import find_checkpoint, find_place, is_checkpoint_of_run

    path = Path(token).expanduser().absolute()
    if path.exists():
        return path
    return find_checkpoint(token) if is_checkpoint_of_run(token) else find_place(token)


def _tell(report: Report, seconds: float) -> None:
    from hpcaccel.view.formatting import clean, size

    speed = f"{size(report.bytes)} in {seconds:.1f} s"
    typer.echo(f"{'good' if report.good else 'DAMAGED'}  {clean(str(report.path))}  ({report.kind}, {speed})")
    for problem in report.problems:
        typer.echo(f"  {clean(problem)}")
    for text in report.notes:
        note(f"  note: {clean(text)}")


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            autocompletion=checkpoint_names,
            help="A checkpoint (RUN, RUN@STEP or a path), one of DCP's, or a model's files (safetensors, .bin, .pt).",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="A directory; for torch a file. It is not overwritten.")
    ],
    to: Annotated[
        Literal["safetensors", "torch", "hpcaccel"],
        typer.Option(
            help="safetensors: model.safetensors, as the Hugging Face libraries read it. torch: a file of torch.save. "
            "hpcaccel: a checkpoint to begin a training from.",
            show_default=False,
        ),
    ],
    model: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Which model, where the checkpoint holds several.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --to torch: the whole training state, not only a model.")
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Where in a foreign checkpoint the model is, such as model or app.net."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Cast floating-point weights, such as to bfloat16.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of a safetensors file.")] = "10GB",
    json: Json = False,
) -> None:
    """Turn a checkpoint into files that other programs read, or their files into a checkpoint.

    Every byte that has a CRC is checked on the way, and no code in a file is run.
    """
    from hpcaccel.checkpoint_files.weight_files import SIZE_WORDS, parse_size
    from hpcaccel.cli.converting import run_convert

    if (there := meant_cluster({"source": source})) is not None:
        raise UserError(
            f"{source} is on {there[0].name}, and files are written on this machine: fetch the checkpoint first "
            f"(hpcaccel pull RUN --checkpoint STEP) and name its directory, or convert it there (ssh "
            f"{there[0].profile.host})"
        )
    if (limit := parse_size(max_shard_size)) is None:
        raise UserError(f"--max-shard-size {max_shard_size!r} is not a size: {SIZE_WORDS}")
    done = run_convert(
        {
            "source": str(_source(source)),
            "target": str(target.expanduser().absolute()),
            "to": to,
            "model": model,
            "whole": whole,
            "part": part,
            "dtype": dtype,
            "max_shard_bytes": limit,
        }
    )
    if json:
        print_json(done)
        return
    from hpcaccel.view.formatting import clean, size

    typer.echo(f"wrote {size(done['bytes'])}, {done['tensors']} tensors:")
    for name in done["files"]:
        typer.echo(f"  {clean(name)}")
    for text in done["notes"]:
        note(f"note: {clean(text)}")


def _source(token: str) -> Path:
    """Whatever lies at that path; of a run or a directory of ours its newest good checkpoint."""
    from hpcaccel import checkpoint_files
    from hpcaccel.submission.checkpoints import find_checkpoint

    path = Path(token).expanduser().absolute()
    ours = any(
        (path / name).exists() for name in (checkpoint_files.MANIFEST, "record.json")
    ) or checkpoint_files.step_directories(path)
    return path if path.exists() and not ours else find_checkpoint(token)


@_there_or_here("pin")
def pin(checkpoint: Checkpoint, why: Annotated[str, typer.Option(metavar="TEXT", help="For people.")] = "") -> None:
    """Keep a checkpoint for good: its run deletes old ones, but no pinned one."""
    from hpcaccel.checkpoint_files.pins import pin
    from hpcaccel.submission.checkpoints import find_checkpoint

    path = find_checkpoint(checkpoint)
    new = pin(path, why=why or "hpcaccel checkpoint pin")
    typer.echo(f"{path} is {'now' if new else 'already'} pinned")


@_there_or_here("unpin")
def unpin(checkpoint: Checkpoint) -> None:
    """Let a run delete a pinned checkpoint again when it is old."""
    from hpcaccel.checkpoint_files.pins import unpin
    from hpcaccel.submission.checkpoints import find_checkpoint

    path = find_checkpoint(checkpoint)
    was = unpin(path)
    typer.echo(f"{path} is {'no longer' if was else 'not'} pinned")
