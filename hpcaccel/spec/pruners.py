"""How a sweep ends bad trials early: the pruners and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field

from hpcaccel.spec.fields import Conflict, Count, Natural, Section
from hpcaccel.spec.problems import did_you_mean

__all__ = ["Asha", "Hyperband", "Median", "Pruner", "PrunerChoice"]

_ELSEWHERE = {
    **dict.fromkeys(("min_resource", "grace_period", "min_t", "min_epochs"), "is called min_steps here"),
    **dict.fromkeys(("max_resource", "max_t", "max_epochs", "total_steps"), "is called max_steps here"),
    **dict.fromkeys(("eta", "reduction"), "is called reduction_factor here"),
    **dict.fromkeys(("time_attr", "resource"), "is always the step that the program logs with its metric"),
    **dict.fromkeys(("brackets", "n_brackets", "s_max"), "follows from min_steps, max_steps and reduction_factor"),
    "bootstrap_count": "is called startup_trials here",
    "n_startup_trials": "is called startup_trials here",
    "n_warmup_steps": "is called warmup_steps here",
    "n_min_trials": "is called startup_trials here",
    "interval": "is called interval_steps here",
}
"""Names of Optuna's and Ray Tune's."""


def _factor(value: int) -> int:
    if value < 2:
        raise ValueError("must be a whole number of at least 2")
    return value


Factor = Annotated[Count, AfterValidator(_factor)]
_REDUCTION = "Of the trials that reach a rung, one in so many goes on; the next rung is so many times as far."
_MAX_STEPS = "The steps of a whole trial, as the program logs them."


class Asha(Section):
    """Asynchronous successive halving: at each rung the best go on, the others end at once."""

    moved: ClassVar[dict[str, str]] = {key: value for key, value in _ELSEWHERE.items() if key != "bootstrap_count"}

    min_steps: Count | None = Field(
        default=None,
        description="The first rung: no trial ends before this step. Default: max_steps / reduction_factor²; without "
        "max_steps the two highest rungs count that a finished trial has passed, and until one has finished, none.",
        examples=[100],
    )
    max_steps: Count | None = Field(
        default=None,
        description=f"{_MAX_STEPS} There is no rung at this step or later. Default: not known.",
        examples=[10_000],
    )
    reduction_factor: Factor = Field(default=4, description=_REDUCTION)

    @classmethod
    def conflicts(cls, values: dict[str, Any]) -> list[Conflict]:
        return [*super().conflicts(values), *_order(values)]


class Hyperband(Section):
    """Successive halving in several brackets: in each the first rung is later, so that slow starters have a chance."""

    moved: ClassVar[dict[str, str]] = {key: value for key, value in _ELSEWHERE.items() if key != "bootstrap_count"}

    max_steps: Count = Field(description=f"{_MAX_STEPS} The number of brackets follows from it.", examples=[10_000])
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

    warmup_steps: Natural = Field(default=0, description="No trial ends before this step.")
    interval_steps: Count | None = Field(
        default=None,
        description="Look every so many steps. Default: each time at twice the step, which keeps the journal small.",
    )
    startup_trials: Count = Field(default=5, description="Finished trials before the first one is ended.")


def _order(values: dict[str, Any]) -> list[Conflict]:
    low, high = values.get("min_steps"), values.get("max_steps")
    if isinstance(low, int) and isinstance(high, int) and low >= high:
        return [Conflict("min_steps", f"{low} must be below max_steps ({high})")]
    return []


class Pruner(Section):
    """At most one of the pruners, with its settings; none of them: every trial runs to its end."""

    rivals: ClassVar[tuple[tuple[str, ...], ...]] = (("asha", "hyperband", "median"),)
    moved: ClassVar[dict[str, str]] = {
        "sha": "is asynchronous here: write asha",
        **dict.fromkeys(("min_steps", "max_steps"), "is a setting of a pruner: write pruner: {asha: {…}}"),
        "reduction_factor": "is a setting of a pruner: write pruner: {asha: {…}}",
    }

    asha: Asha | None = Field(default=None, description="Asynchronous successive halving, which ends trials at rungs.")
    hyperband: Hyperband | None = Field(default=None, description="ASHA in several brackets.")
    median: Median | None = Field(default=None, description="The median of the finished trials is the measure.")

    @property
    def rule(self) -> Asha | Hyperband | Median | None:
        """The settings of the one that was chosen."""
        return self.asha or self.hyperband or self.median

    @property
    def name(self) -> str:
        """asha, hyperband, median or none."""
        return next((key for key in self.rivals[0] if getattr(self, key) is not None), "none")


def _pruner(value: Any) -> Any:
    """``asha`` is short for ``{asha: {}}``."""
    names = [*Pruner.rivals[0], "none"]
    if value is None or value == "none":
        return {}
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"is not allowed (has: {', '.join(names)}){did_you_mean(value, names)}")
        return {value: {}}
    if isinstance(value, Mapping):
        alone = len(value) == 1  # `asha:` with nothing behind it; of several, null is one that was not chosen
        return {key: {} if settings is None and alone else settings for key, settings in value.items()}
    return value


class _NameOrMapping:
    """Both spellings, in the JSON schema."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"enum": [*Pruner.rivals[0], "none", None]}, handler(core_schema)]}


PrunerChoice = Annotated[Pruner, BeforeValidator(_pruner), _NameOrMapping()]
"""A pruner by its name, or a mapping of its name to its settings."""
