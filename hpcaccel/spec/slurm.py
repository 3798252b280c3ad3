"""What to ask Slurm for, and what to give srun, in their own words."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hpcaccel.spec import quantities
from hpcaccel.spec.fields import CommaList, Conflict, Section, Time, Whole, Word, words
from hpcaccel.spec.owned_flags import owned_by_srun
from hpcaccel.spec.resources import Resources

__all__ = ["Slurm", "Srun"]


class Slurm(Resources):
    """Resources and queue, by the long names of sbatch's options with _ for -."""

    time: Time = Field(
        default="01:00:00",
        description="Time limit of one job: minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
        "days-hours:minutes or days-hours:minutes:seconds. A run that needs longer is requeued and goes on. "
        "Default: one hour.",
        examples=["04:00:00", "1-00:00:00"],
    )
    time_min: Time | None = Field(
        default=None, description="A shorter limit that Slurm may choose to start the job earlier."
    )
    comment: Word | None = Field(default=None, description="A comment in Slurm's records.")
    mail_type: CommaList | None = Field(default=None, description="When Slurm sends mail.", examples=["END,FAIL"])
    mail_user: Word | None = Field(default=None, description="Who gets the mail.")
    begin: Word | None = Field(default=None, description="Not before this time.", examples=["now+1hour"])
    clusters: CommaList | None = Field(default=None, description="Clusters of a federation to submit to.")
    deadline: Word | None = Field(default=None, description="Remove the job when it cannot end before this time.")
    dependency: Word | None = Field(
        default=None, description="Start after other jobs.", examples=["afterok:1234", "singleton"]
    )
    nice: Whole | None = Field(default=None, description="Lowers the job's priority by so much.")
    priority: Word | None = Field(default=None, description="A priority, for those who may set one.")
    wckey: Word | None = Field(default=None, description="The workload characterization key.")

    @property
    def time_seconds(self) -> int | None:
        """The time limit, None for none."""
        return quantities.time_seconds(self.time)


class Srun(Section):
    """What srun gets beside hpcaccel's own flags when it starts the ranks."""

    extra: list[Word] = words("More flags for srun, one word each, passed as they are: [--cpu-bind=none].")

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        found = super().conflicts(values)
        extra = values.get("extra")
        for index, item in enumerate(extra if isinstance(extra, list) else []):
            text = str(item)
            if index == 0 and not text.startswith("-"):
                advice = f"must begin with a flag of srun's, such as --cpu-bind=none, not {text!r}"
                found.append(Conflict("extra.0", advice))
            if flag := owned_by_srun(text):
                found.append(Conflict(f"extra.{index}", f"{text!r} sets --{flag}, which hpcaccel sets itself"))
        return found
