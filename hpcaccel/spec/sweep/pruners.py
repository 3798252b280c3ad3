"""Pruners, which end bad trials of a sweep early, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.spec.job.fields import Conflict, Count, Natural, Section

__all__ = ["Asha", "Hyperband", "Median", "Pruner", "PrunerChoice"]

_ELSEWHERE = {
    **dict.fromkeys(("min_resource", "grace_period", "min_t", "min_epochs"), "is called min_steps here"),
    **dict.fromkeys(("max_resource", "max_t", "max_epochs", "total_steps"), "is called max_steps here"),
    **dict.fromkeys(("eta", "reduction"), "is called reduction_factor here"),
    **dict.fromkeys(("time_attr", "resource"), "is always the step that the program logs with its metric"),
    **dict.fromkeys(("brackets", "n_brackets", "s_max"), "is computed from min_steps, max_steps and reduction_factor"),
    "bootstrap_count": "is called startup_trials here",
    "n_startup_trials": "is called startup_trials here",
    "n_warmup_steps": "is called warmup_steps here",
    "n_min_trials": "is called startup_trials here",
    "interval": "is called interval_steps here",
}
"""Setting names from Optuna and Ray Tune, each with the message that names the setting here."""


def _factor(value: int) -> int:
    if value < 2:
        raise ValueError("must be a whole number of at least 2")
    return value


Factor = Annotated[Count, AfterValidator(_factor)]
_REDUCTION = "One in this many trials that reach a rung continues; the next rung is at this many times the rung's step."
_MAX_STEPS = "Steps of a complete trial, as the program logs them."


class Asha(Section):
    """Asynchronous successive halving: at each rung the best trials continue and the others end at once."""

    moved: ClassVar[dict[str, str]] = {key: value for key, value in _ELSEWHERE.items() if key != "bootstrap_count"}

    min_steps: Count | None = Field(
        default=None,
        description="The first rung: no trial is pruned before this step. Default: max_steps / reduction_factor². "
        "Without max_steps, only the two highest rungs that a finished trial has passed are used; no trial is pruned "
        "until one has finished.",
        examples=[100],
    )
    max_steps: Count | None = Field(
        default=None,
        description=f"{_MAX_STEPS} There is no rung at this step or later. Default: unknown.",
        examples=[10_000],
    )
    reduction_factor: Factor = Field(default=4, description=_REDUCTION)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        return [*super().conflicts(values), *_order(values)]


class Hyperband(Section):
    """Successive halving in several brackets, each with a later first rung, so that slow starters get a chance."""

    moved: ClassVar[dict[str, str]] = {key: value for key, value in _ELSEWHERE.items() if key != "bootstrap_count"}

    max_steps: Count = Field(description=f"{_MAX_STEPS} It determines the number of brackets.", examples=[10_000])
    min_steps: Count | None = Field(
        default=None, description="The first rung of the first bracket. Default: max_steps / reduction_factor³."
    )
    reduction_factor: Factor = Field(default=3, description=_REDUCTION)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        return [*super().conflicts(values), *_order(values)]


class Median(Section):
    """A trial ends when its best value so far is worse than the median of the finished trials at the same rung."""

    moved: ClassVar[dict[str, str]] = _ELSEWHERE

    warmup_steps: Natural = Field(default=0, description="No trial is pruned before this step.")
    interval_steps: Count | None = Field(
        default=None,
        description="Steps between checks. Default: each check at twice the step of the previous one, which keeps the "
        "journal small.",
    )
    startup_trials: Count = Field(default=5, description="Number of finished trials before any trial is pruned.")


def _order(values: dict[str, Any]) -> list[Conflict]:
    low, high = values.get("min_steps"), values.get("max_steps")
    if isinstance(low, int) and isinstance(high, int) and low >= high:
        return [Conflict("min_steps", f"{low} must be below max_steps ({high})")]
    return []


class Pruner(Section):
    """At most one pruner, with its settings. Without one, no trial is pruned."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("asha", "hyperband", "median"),)
    moved: ClassVar[dict[str, str]] = {
        "sha": "is available only in its asynchronous form: use asha",
        **dict.fromkeys(("min_steps", "max_steps"), "is a setting of a pruner: write pruner: {asha: {…}}"),
        "reduction_factor": "is a setting of a pruner: write pruner: {asha: {…}}",
    }

    asha: Asha | None = Field(default=None, description="Asynchronous successive halving, which ends trials at rungs.")
    hyperband: Hyperband | None = Field(default=None, description="ASHA in several brackets.")
    median: Median | None = Field(
        default=None, description="Ends trials that are worse than the median of the finished ones."
    )

    @property
    def rule(self) -> Asha | Hyperband | Median | None:
        """The settings of the chosen pruner, or None if no pruner is chosen."""
        return self.asha or self.hyperband or self.median

    @property
    def name(self) -> str:
        """The name of the chosen pruner: asha, hyperband, median or none."""
        return next((key for key in self.rivals[0] if getattr(self, key) is not None), "none")


def _pruner(value: Any) -> Any:
    """Convert the name of a pruner to a mapping: ``asha`` to ``{asha: {}}``."""
    names = [*Pruner.rivals[0], "none"]
    if value is None or value == "none":
        return {}
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"is not valid (allowed: {', '.join(names)}){did_you_mean(value, names)}")
        return {value: {}}
    if isinstance(value, Mapping):
        alone = len(value) == 1  # `asha:` without settings; among several keys, null means not chosen
        return {key: {} if settings is None and alone else settings for key, settings in value.items()}
    return value


class _NameOrMapping:
    """Annotation that gives a field a JSON schema for both spellings of a pruner, a name and a mapping."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"enum": [*Pruner.rivals[0], "none", None]}, handler(core_schema)]}


PrunerChoice = Annotated[Pruner, BeforeValidator(_pruner), _NameOrMapping()]
"""A pruner, given as its name, or as a mapping from its name to its settings."""
