"""``sharing``: a run directory that a group may read, and whose ``control/`` it may write to."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hpcaccel.spec.job.fields import Section, Word

__all__ = ["Sharing", "SharingSection", "sharing_field"]


class SharingSection(Section):
    """The group that a run is shared with."""

    group: Word | None = Field(
        default=None,
        description="Name of the group. Default: the group that owns the folder in which the run directory is created.",
        examples=["project42"],
    )


def _setting(value: Any) -> Any:
    """``group`` is short for ``{group: null}``."""
    if isinstance(value, str):
        if value != "group":
            raise ValueError(f"must be group or {{group: NAME}}, not {value!r}")
        return {}
    return value


Sharing = Annotated[
    SharingSection | None,
    BeforeValidator(_setting, json_schema_input_type=Literal["group"] | SharingSection | None),
]


def sharing_field(what: str) -> Any:
    """The field ``sharing`` of a model; ``what`` begins its description."""
    return Field(
        default=None,
        description=f"{what}: `group`, the group of the folder in which the run directory is created, or "
        "`{group: NAME}`. Default: nobody else.",
        examples=["group", {"group": "project42"}],
    )
