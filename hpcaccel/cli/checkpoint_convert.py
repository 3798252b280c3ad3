"""``checkpoint convert``: runs the conversion in a separate process with torch, since commands do not import torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hpcaccel.cli.options import Json
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.target_cluster import cluster_of_arguments
from hpcaccel.cli.run_names import complete_checkpoint
from hpcaccel.errors import HpcaccelError, UserError

__all__ = ["convert", "run_convert"]

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        autocompletion=complete_checkpoint,
        help="A checkpoint (RUN, RUN@STEP or a path), a DCP checkpoint, or model files (safetensors, .bin, .pt).",
        show_default=False,
    ),
]
Target = Annotated[
    Path, typer.Argument(metavar="DST", help="Output directory; with --to torch a file. It must not exist yet.")
]
Format = Annotated[
    Literal["safetensors", "torch", "hpcaccel"],
    typer.Option(
        help="safetensors: model.safetensors, for the Hugging Face libraries. torch: a torch.save file. "
        "hpcaccel: a checkpoint from which a training can start.",
        show_default=False,
    ),
]
Model = Annotated[
    int | None, typer.Option(metavar="N", min=0, help="Index of the model, if the checkpoint has several.")
]
Whole = Annotated[bool, typer.Option("--whole", help="With --to torch: the whole training state, not only a model.")]
Part = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Key of the model in another program's checkpoint, such as model or app.net."),
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="Dtype to cast floating-point weights to, such as bfloat16.")
]
ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of a safetensors file.")]


def convert(
    source: Source,
    target: Target,
    to: Format,
    model: Model = None,
    whole: Whole = False,
    part: Part = None,
    dtype: Dtype = None,
    max_shard_size: ShardSize = "10GB",
    json: Json = False,
) -> None:
    """Convert a checkpoint into files for other programs, or such files into a checkpoint.

    The data read is checked against its CRCs, if it has any. Code contained in a file is never run.
    """
    from hpcaccel.checkpoint_files.weight_files import SIZE_ADVICE, parse_size

    if (there := cluster_of_arguments({"source": source})) is not None:
        raise UserError(
            f"{source} is on {there[0].name}, and the conversion runs on this machine: fetch the checkpoint first "
            f"(hpcaccel pull RUN --checkpoint STEP) and pass its directory, or convert it there (ssh "
            f"{there[0].profile.host})"
        )
    if (limit := parse_size(max_shard_size)) is None:
        raise UserError(f"--max-shard-size {max_shard_size!r} is not a size: {SIZE_ADVICE}")
    result = run_convert(
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
        print_json(result)
    else:
        _print_result(result)


def _print_result(result: dict[str, Any]) -> None:
    from hpcaccel.core.formatting import clean, size

    tensors = f"{result['tensors']} tensor{'' if result['tensors'] == 1 else 's'}"
    typer.echo(f"wrote {size(result['bytes'])}, {tensors}:")
    for name in result["files"]:
        typer.echo(f"  {clean(name)}")
    for text in result["notes"]:
        note(f"note: {clean(text)}")


def _source(token: str) -> Path:
    """The path ``token`` if it exists and is not a run or a checkpoint of hpcaccel; otherwise the checkpoint that
    ``token`` names."""
    from hpcaccel import checkpoint_files
    from hpcaccel.submission.runs.checkpoints import find_checkpoint

    path = Path(token).expanduser().absolute()
    ours = any(
        (path / name).exists() for name in (checkpoint_files.MANIFEST, "record.json")
    ) or checkpoint_files.step_directories(path)
    return path if path.exists() and not ours else find_checkpoint(token)


def run_convert(request: dict[str, Any]) -> dict[str, Any]:
    """Run a conversion and show its progress.

    Args:
        request: what to convert; ``hpcaccel.checkpoint.formats`` reads it as JSON.

    Returns:
        The result that ``hpcaccel.checkpoint.formats`` prints as JSON.

    Raises:
        UserError: torch is not installed, or the conversion is impossible; the message gives the reason.
        HpcaccelError: the conversion process failed unexpectedly; its error is on stderr.
    """
    from hpcaccel.view.progress import Transfer

    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"conversion needs torch, which is not installed for {sys.executable}: run `python -m hpcaccel checkpoint "
            "convert …` with the Python of your training, or install it with `pip install 'hpcaccel[train]'`"
        )
    command = [sys.executable, "-m", "hpcaccel.checkpoint.formats"]
    message: dict[str, Any] = {}
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        Transfer(f"converting {request['source']}") as transfer,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                message = json.loads(line)
                if "total" in message:
                    transfer.update(message["done"], message["total"])
        except BaseException:
            process.terminate()
            raise
    if "problem" in message:
        raise UserError(message["problem"])
    if process.returncode != 0 or "files" not in message:
        raise HpcaccelError(
            f"the conversion process failed with exit code {process.returncode}; see its output above, if any"
        )
    return message
