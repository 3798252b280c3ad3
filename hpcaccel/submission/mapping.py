"""``hpcaccel.map``: one function over many items, as one array of jobs; submitit's ``map_array``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpcaccel.errors import UserError
from hpcaccel.spec import JobSpec
from hpcaccel.submission.calls import ItemCall
from hpcaccel.submission.run_handle import RunArray
from hpcaccel.submission.submit import submit

__all__ = ["map"]


def map(
    function: Callable[..., Any],
    *items: Iterable[Any],
    spec: str | os.PathLike[str] | JobSpec | Mapping[str, Any],
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    after: Sequence[str] = (),
) -> RunArray:
    """Call ``function(item)`` for each of ``items``, each in a task of one array, with what ``spec`` asks for.

    Of several iterables one item each, to the end of the shortest, as the builtin does. Task ``i`` is a run of its own,
    ``array[i]``; ``array.results()`` are the results in the order of the items.

    Args:
        spec: resources and environment of each task: a path, a spec or a mapping.
        cluster, runs_dir, overrides, name, after: as of :func:`hpcaccel.submit`.

    Raises:
        UserError: there is no item, or one cannot be pickled; and what :func:`hpcaccel.submit` raises.
    """
    calls = list(zip(*items, strict=False))
    if not calls:
        raise UserError("hpcaccel.map() has no items: an array needs one task at least")
    axis = "args.item=" + ",".join(str(number) for number in range(len(calls)))
    array = submit(
        ItemCall(function, calls),
        spec=spec,
        cluster=cluster,
        runs_dir=runs_dir,
        overrides=overrides,
        grid=[axis],
        name=name,
        after=after,
    )
    assert isinstance(array, RunArray)
    return array
