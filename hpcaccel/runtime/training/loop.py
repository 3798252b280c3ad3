"""The training loop's five verbs: ``resume``, ``epochs``, ``steps``, ``checkpoint``, ``should_stop``.

A *step* is a completed optimizer step: one call of the first prepared optimizer's ``step`` at an accumulation
boundary (also one that fp16 skipped), or one call of ``checkpoint`` where no optimizer was prepared. All ranks save
and stop at the same step, because they act only on what they have agreed on (see ``stop_agreement``).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel import checkpoint_files
from hpcaccel.core.run_dir import make_folder, write_json
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing.saver import Prepared, Saver
from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.settings import Place, Settings
from hpcaccel.runtime.training.accumulation import Accumulation, LoadersInUse
from hpcaccel.runtime.training.activity import Activity
from hpcaccel.runtime.training.attempt_timing import Clock
from hpcaccel.runtime.training.counters import Counters, Resumed
from hpcaccel.runtime.training.exactness import Exactness, changes_of
from hpcaccel.runtime.training.metrics_writer import MetricsWriter
from hpcaccel.runtime.training.process_exit import Ending
from hpcaccel.runtime.training.save_schedule import Saves
from hpcaccel.runtime.training.stop_agreement import BUSY, FAILED, StopAgreement, StopFlag, Verdict

if TYPE_CHECKING:
    from hpcaccel.core.records import Outcome, Reason, StopRequest
    from hpcaccel.runtime.health.stragglers import OwnTime

__all__ = ["Loop", "Resumed"]

PATIENCE_STEPS = 100
"""So many steps may pass before a backward pass says that they are over, where others should have said so."""
_TRAINED_AT: set[Path] = set()
"""Directories with checkpoints of trainings of this process that are over: those of runs."""


class Loop:
    """Counts, asks, saves, stops. One for each process; every method is called by all ranks alike."""

    def __init__(
        self,
        *,
        place: Place,
        group: Group,
        settings: Settings,
        prepared: Prepared,
        accumulation: Accumulation,
        in_use: LoadersInUse,
        flag: StopFlag,
        clock: Clock,
    ) -> None:
        self.finishing = self._pruned = False
        self.activity = Activity(is_main=group.is_main)
        self.first_step = 0
        self.rollcall = None if group.exchange is None else group.exchange.rollcall
        self.own_time = self._measure_own_time(group, settings, in_use)
        self._place = place
        self._group = group
        self._settings = settings
        self._prepared = prepared
        self.accumulation = accumulation
        """Of the newest Accelerator."""
        self._in_use = in_use
        self._flag = flag
        self.clock = clock
        self.metrics = MetricsWriter(place.metrics if group.is_main else None, attempt=place.attempt)
        self._counters = Counters(self.metrics)
        self.saver = Saver(place, group, settings, prepared)
        self._exactness = Exactness(settings=settings, prepared=prepared, in_use=in_use, device=group.device)
        self._saves = Saves(
            self.saver,
            exactness=self._exactness,
            group=group,
            settings=settings,
            counters=self._counters,
            metrics=self.metrics,
            clock=clock,
            activity=self.activity,
        )
        self._ending = Ending(place, group, self.end, flag.deafen)
        self._agreement = StopAgreement(group.control, None if group.exchange is None else group.exchange.rollcall)
        self._resumed: Resumed | None = None
        self._rng: Any = None
        self._left_half_way = False
        self._called_for = False
        """Whether the script itself called for the checkpoint that was loaded."""
        self._seen_step = 0
        self._stepped: set[int] = set()
        """Of the prepared optimizers but the first one those that have stepped since the last step was over."""
        self._held = 0
        self._owes = False
        """Whether steps have been done of which nobody was asked whether to save or to stop."""
        self._script_asks = False
        """Whether the script calls ``checkpoint``, and knows best when a step is over."""
        self._checked = False
        self._is_to_go_on = False
        """Whether it was stopped, and goes on from its checkpoint."""
        self._used = False
        """Whether the script uses any of the five verbs. One that does not only saves when it is stopped."""
        self._warned = self.saver.has_place
        self._fresh = True

    @property
    def step(self) -> int:
        return self._counters.step

    @property
    def epoch(self) -> int:
        return self._counters.epoch

    # -- the verbs --------------------------------------------------------------------------------------------------

    def resume(self) -> Resumed:
        """Load the newest checkpoint into everything prepared; called again, it answers the same.

        Raises:
            RuntimeMisuse: nothing has been prepared; or the checkpoints are those of a training of this program that
                is over.
            SystemExit: a stop was asked for while the program was starting.
        """
        if not self._used:
            self._refuse_a_second_training()
        self._used = True
        if self._resumed is not None:
            return self._resumed
        if not (self._prepared.models or self._prepared.optimizers or self._prepared.registered):
            raise RuntimeMisuse(
                "resume() before anything was prepared: there is nothing to load into. Call it after prepare()"
            )
        self.clock.prepared()
        path = self.saver.find()
        self._stop_before_start(path)
        if path is not None:
            return self.load(path)
        self._resumed = Resumed(0, 0, None)
        self.clock.loaded(0)
        if self.saver.has_place:
            self.activity.say("starting at step 0: no checkpoint yet")
        return self._resumed

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``, the one that was interrupted first."""
        length = self._epoch_steps()
        self._enter(None if length is None else count * length)
        while self.epoch < count and not self.finishing:
            try:
                yield self.epoch
            except GeneratorExit:
                self.loop_is_left()
                raise
            self.step_is_over()
            if not self.finishing:
                self._counters.epoch += 1
                self._ask_at_once()  # not before: whoever goes on from here begins the next epoch
        self._exit()

    def steps(self, count: int) -> Iterator[int]:
        """The number of steps done, as long as it is less than ``count``."""
        self._enter(count)
        while self.step < count and not self.finishing:
            try:
                yield self.step
            except GeneratorExit:
                self.loop_is_left()
                raise
            self.step_is_over()
        self._exit()

    def checkpoint(self) -> None:
        """Once a step: saves when it is due; when the training is to stop and to be continued, saves and leaves.

        Between accumulation boundaries it does nothing.

        Raises:
            SystemExit: with code 85, on all ranks at the same step.
            CheckpointError: the checkpoint could not be saved.
        """
        if not self._used:
            self._refuse_a_second_training()
        self._used = self._script_asks = True
        if not self._prepared.optimizers:
            self._count()
        self.step_is_over()

    def _refuse_a_second_training(self) -> None:
        if self.saver.directory in _TRAINED_AT:
            raise RuntimeMisuse(
                f"{self.saver.directory} holds the checkpoints of a training that this program has ended: another one "
                "cannot go on from them. Train this stage in a job of its own (`after:`, `submit --from`), or loop "
                "over its loader without epochs(), steps(), resume() and checkpoint(), with save_state() and "
                "load_state()"
            )

    def should_stop(self) -> bool:
        """Whether the training is to end for good now; the loops above then end by themselves."""
        return self.finishing

    # -- what the rest of the runtime tells -------------------------------------------------------------------------

    def count_step(self) -> None:
        """The first prepared optimizer has stepped."""
        self._count()
        source = self._in_use.current
        if source is not None:
            source.trains = True

    def _count(self) -> None:
        counters = self._counters
        counters.step = step = counters.step + 1
        self.activity.left_at = None
        self.clock.count(step)
        self._exactness.stepped(step, counters.epoch)

    def count_another(self, optimizer: object) -> None:
        """A prepared optimizer has stepped that is not the first one."""
        self._stepped.add(id(optimizer))
        self._exactness.stepped(self.step, self.epoch, first=False)

    def backward_begins(self) -> None:
        """The last moment to say that a step is over, for scripts without a prepared loader and without the verbs.

        A save here holds everything as the last step left it; only the global generators may have been drawn from
        since, by the forward pass. With several optimizers, of a GAN say, it is a moment after all have stepped.
        """
        behind = self._counters.step - self._seen_step
        if self.own_time is not None:
            self.own_time.backward_begins()
        if behind:
            self._step_is_over_at_last(behind)
        self._exactness.backward()

    def _step_is_over_at_last(self, behind: int) -> None:
        told_elsewhere = self._script_asks or self._in_use.current is not None
        all_stepped = len(self._stepped) >= len(self._prepared.optimizers) - 1
        # A loader that has given nothing for so many steps feeds something else, and a stop must not wait for it.
        if behind >= PATIENCE_STEPS or (all_stepped and not told_elsewhere):
            self._exactness.in_backward = True
            self.step_is_over()
            self._exactness.in_backward = False
            if self.own_time is not None:
                self.own_time.forget()

    def step_is_over(self) -> None:
        """All that belongs to the last step is done: the moment to save and to stop."""
        step = self._counters.step
        if step == self._seen_step or self._held:
            if self._flag.raised:
                self._tell_of_waiting()
            return
        self._seen_step = step
        self.clock.tick(step)
        if self._stepped:
            self._stepped.clear()
        if self._fresh:
            self._begin()
        elif self.activity.phase == "finishing":  # another loop, of the script's own
            self._trains()
        if not self._warned:
            self._warn_no_place()
        if self._agreement.is_quiet and not (
            self._flag.raised or self.saver.in_flight or (self._used and self._saves.is_due(step + 1))
        ):
            return
        verdict = self._agreement.read()
        if verdict is not None:
            if verdict.uneven:
                self._in_use.warn_of_uneven_passes(self._group)
            if verdict.stop or verdict.save or self.saver.in_flight:
                self._act(verdict)
        if self._agreement.times and self.own_time is not None:
            self.own_time.hear(step, self._agreement.times)
            self._agreement.times = []
        self._issue()
        if self.own_time is not None:
            self.own_time.step_is_over()

    @contextmanager
    def ticks_held(self) -> Iterator[None]:
        """Neither save nor stop inside, for ranks that do unequal numbers of steps there, but after it (in ``epochs``:
        after the epoch). All ranks enter and leave."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            # Ranks that have not stepped inside would not ask now, and those that have must not ask without them.
            self._seen_step = self._counters.step
        self._owes = not self._held
        if not self._used:
            self._ask_at_once()

    def _ask_at_once(self) -> None:
        """All ranks are here, after steps of which nobody was asked: hear what was said before them, ask, and wait for
        the answer. Epochs that are held as a whole would never save nor stop otherwise."""
        if not self._owes:
            return
        self._owes = False
        if self._fresh:
            self._begin()
        before = self._agreement.read() or Verdict()
        self._issue()
        now = self._agreement.read() or Verdict()
        if before.stop or now.stop or before.save or now.save or self.saver.in_flight:
            self._act(now._replace(stop=before.stop or now.stop, save=before.save or now.save))
        self._issue()

    @property
    def finished_epochs_are_over(self) -> bool:
        """Whether an epoch that the checkpoint has at its very end counts as done. Our verbs, and scripts that restore
        the epoch's number with everything else, come back to it and find nothing left. Others find their epoch by
        dividing the steps, as for every checkpoint that they have called for themselves."""
        return not self._used and (self._called_for or not self._prepared.registered)

    def loop_is_entered(self) -> None:
        """The script iterates over the batches that it trains on, again."""
        self.activity.left_at = None

    def loop_is_left(self) -> None:
        """The script leaves its loop before the loop's end, and may keep the other ranks waiting."""
        self.activity.left_at = call_site()

    def restore_rng(self) -> None:
        """Set the generators again to where the checkpoint has them; what ran since then has drawn from them."""
        if self._rng is not None:
            self.saver.restore_rng(self._rng)
            self._rng = None

    def load(self, path: Path, *, given: Path | None = None, fall_back: bool = True) -> Resumed:
        """Restore ``path`` into everything prepared; see ``Saver.load``."""
        self.clock.prepared()
        with self.activity.during("loading"):
            return self._load(path, given=given, fall_back=fall_back)

    def _load(self, path: Path, *, given: Path | None, fall_back: bool) -> Resumed:
        loaded = self.saver.load(path, self._counters, given=given, fall_back=fall_back)
        if self._settings.deterministic and self._group.device.type == "cpu":
            torch.set_num_threads(self._counters.threads)
        self._rng = self.saver.random_state(loaded)
        self._left_half_way = any(loader.state_dict()["running"] for loader in self._prepared.loaders)
        self.saver.restore_rng(self._rng)
        self._seen_step = self.step
        self._saves.begin_at(self.step)
        self._checked = True
        self._called_for = loaded.manifest["reason"] == "save_state"
        self._resumed = Resumed(self.step, self.epoch, loaded.path)
        reasons, guarantee = loaded.differences, loaded.guarantee
        if guarantee == "bit-exact" and (changes := changes_of(self._prepared.loaders)):
            reasons, guarantee = changes, "state-exact"
        why = f" ({'; '.join(reasons)})" if reasons else ""
        self.activity.say(f"resumed at step {self.step} from {loaded.path}, {guarantee}{why}")
        self.clock.loaded(self.step)
        if loaded.random_states:
            self.activity.say(f"random states: {loaded.random_states}")
        return self._resumed

    def save(
        self, reason: str, directory: Path | None = None, *, missing: Sequence[int] = (), background: bool = False
    ) -> Path:
        """Save now; see ``Saves.now``."""
        return self._saves.now(reason, directory, missing=missing, background=background)

    def end(self) -> None:
        """The program ends by itself: save what is not saved yet, say so, leave the group."""
        self.activity.phase = "leaving"
        if self.rollcall is not None:
            self.rollcall.left_at = self.activity.left_at
        self.metrics.flush()
        if (self.step > self._saves.step or self.saver.in_flight) and self.saver.has_place and self._used:
            # Only after a loop that was left by ``break``. Ranks that do not come have ended otherwise: then no word.
            if not self._group.meet_at_exit():
                return
            self._keep_result("completed")
        self.saver.close()
        self.clock.end()
        if self._used and self.saver.directory is not None and self._place.run is not None and not self._is_to_go_on:
            _TRAINED_AT.add(self.saver.directory)
        self._ending.complete(self._outcome("completed", resume=False))

    def abandon(self) -> None:
        """Nothing more is saved or said."""
        self.metrics.flush()
        self.clock.end()
        self.saver.close()
        self._ending.forget()

    # -- stopping and saving ----------------------------------------------------------------------------------------

    def _issue(self, *, active: bool = True) -> None:
        save = active and self._used and self._saves.is_due(self.step + 1)
        own = self.own_time.take() if self.own_time is not None and self._agreement.gathers else None
        self._agreement.issue(
            stop=self._flag.raised,
            save=save,
            active=active,
            passes=self._in_use.passes,
            own=own,
            saving=self._saves.word,
        )

    def _act(self, verdict: Verdict) -> None:
        if self.saver.in_flight and verdict.saving != BUSY:
            self._saves.land(failed=verdict.saving == FAILED)
        if verdict.stop:
            self._stop()
        if verdict.save:
            self._saves.due()

    def _stop(self) -> None:
        request, in_time = self._ending.request(save_seconds=self.clock.expected_save_seconds)
        if request.then == "finish":
            self._finish(request)
            return
        if in_time:
            self._saves.if_newer(request.reason)
        self._saves.wait()
        self._leave(request.reason)

    def _finish(self, request: StopRequest) -> None:
        """Leave the loops, and let the script come to its end."""
        self.finishing, self._pruned = True, request.reason == "pruned"
        self._flag.clear()

    def _keep_result(self, reason: str) -> None:
        """Save what was reached; not of a trial that was pruned, of which no checkpoint is kept."""
        if self._pruned:
            self._saves.wait()
        else:
            self._saves.if_newer(reason)

    def _tell_of_waiting(self) -> None:
        """A stop that comes while a loader is read that nothing is trained on waits for the next step: an evaluation
        may be rank 0's alone, which must not ask the others."""
        source = self._in_use.current
        if self._fresh or source is None or source.trains:
            return
        self.activity.say_once(
            "a stop was asked for during an evaluation: it comes at the next training step. Should the ranks be killed "
            f"before that, the training goes on from {self._saves.newest or 'the start'}"
        )

    def _stop_before_start(self, path: Path | None) -> None:
        """Honour a stop that came while the program was starting: nothing is lost, so nothing is saved or loaded."""
        if not self._group.max_of(int(self._flag.raised)):
            return
        request, _ = self._ending.request()
        if request.then == "finish":
            self._finish(request)
            return
        found = (
            next((item for item in checkpoint_files.committed(path.parent) if item.path == path), None)
            if path
            else None
        )
        self._counters.step = self._saves.step = found.step if found else 0
        self._leave(request.reason)

    def _leave(self, reason: Reason) -> None:
        self._is_to_go_on = True
        self.activity.phase = "leaving"
        self.activity.say(f"stopping at step {self.step} ({reason}): {self._saves.what_is_saved()}")
        self.metrics.flush()
        self.clock.end()
        self._ending.leave(self._outcome(reason, resume=True), saved=self.saver.has_place)

    def _outcome(self, reason: Reason, *, resume: bool) -> Outcome:
        from hpcaccel.core.records import Outcome

        return Outcome(
            reason=reason,
            step=self.step,
            checkpoint=self._saves.newest,
            resume=resume,
            first_loss=self.metrics.first_loss,
            last_loss=self.metrics.last_loss,
        )

    # -- entering and leaving a loop --------------------------------------------------------------------------------

    def _enter(self, total_steps: int | None) -> None:
        resumed = self.resume()
        run = self._place.run
        if run is not None and self._group.is_main:
            from hpcaccel.core.records import Progress, to_dict

            path = run.progress(self._place.attempt)
            make_folder(path.parent)
            progress = Progress(
                resumed_step=resumed.step,
                resumed_from=resumed.path.name if resumed.path else None,
                total_steps=total_steps,
                time=time.time(),
            )
            write_json(path, to_dict(progress))
        if not self._left_half_way:
            self.restore_rng()  # else the loader does, when it takes up its epoch
        self._exactness.begin()
        if not self._agreement.pending:
            self._issue()
        self._trains()

    def _exit(self) -> None:
        """A loop has ended on this rank: agree with the others until it has ended on all, then save the result."""
        inactive = False
        while True:
            verdict = self._agreement.read()
            if verdict is not None:
                self._act(verdict)
                if inactive and not verdict.active:
                    break
            self._issue(active=False)
            inactive = True
        self._keep_result("end of the loop")
        self.activity.phase, self.activity.left_at = "finishing", None

    def _trains(self) -> None:
        self.activity.phase, self.first_step = "training", self.step

    @property
    def batches(self) -> int:
        """How many batches prepared loaders have given."""
        return self._in_use.batches

    @property
    def evaluates(self) -> bool:
        """Whether a loader is read that nothing has been trained on."""
        source = self._in_use.current
        return source is not None and not source.trains and not self._fresh

    @staticmethod
    def _measure_own_time(group: Group, settings: Settings, in_use: LoadersInUse) -> OwnTime | None:
        """A lone rank waits for nobody."""
        if group.world_size == 1:
            return None
        from hpcaccel.runtime.health.stragglers import OwnTime

        waits_in_forward = settings.strategy == "fsdp" or group.tensor_size > 1
        own = OwnTime(group.device, until_batch=waits_in_forward)
        in_use.own_time = own if waits_in_forward else None
        return own

    def _epoch_steps(self) -> int | None:
        """Optimizer steps of one pass over the first prepared loader."""
        if not self._prepared.loaders:
            return None
        loader = self._prepared.loaders[0]
        try:
            batches = len(loader) if isinstance(loader, Sized) else None
        except TypeError:  # an iterable dataset
            batches = None
        return None if batches is None else -(-batches // self.accumulation.steps)

    # -- the first step, and misuse -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first step of this process is over."""
        self._fresh = False
        self._exactness.begin()
        if self.activity.phase != "training":
            self._trains()
        if not self._checked:
            self._check_resumed()
        from hpcaccel.runtime.training.effective_batch import effective_batch

        text = effective_batch(self.accumulation, self._group)
        if text is not None:
            self.activity.say_once(text)

    def _check_resumed(self) -> None:
        """At the first step: a run that has a checkpoint must not start from the beginning without a word."""
        self._checked = True
        path = self.saver.find() if self._resumed is None else None
        if path is None or self.saver.has_made(path):
            return
        if self._used:
            raise RuntimeMisuse(
                f"this run has a checkpoint, {path}, but the script trains from the start. Call accelerator.resume() "
                "after prepare() (epochs() and steps() do so too), or set checkpoint.resume to never"
            )
        self.activity.say(
            f"this run has a checkpoint, {path}, which the script does not load: it trains from the start. "
            "accelerator.load_state() without a path would load it"
        )

    def _warn_no_place(self) -> None:
        if self._used and not self._warned:
            self._warned = True
            warnings.warn(
                "nothing will be saved: there is no run directory. Submit the script with hpcaccel, or give "
                "Accelerator(project_dir=...)",
                stacklevel=4,
            )
