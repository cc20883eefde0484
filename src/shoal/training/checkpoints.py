"""Training state on disk: whole or absent, the last N, readable at any world size.

A checkpoint is a directory `step-00000012` in torch's distributed format with fully qualified names, so that another number
of ranks can read it, plus `trainer.json`. It is written under a temporary name and renamed when every byte is synced; what
a killed process left behind under a temporary name is never read, and removed by the next load or save. The rename waits for the
caller's confirmation, so that no checkpoint appears before the version that it holds is settled. Leaving the context, also by
an exception, waits for the writer: nothing writes into the directory afterwards.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from shoal.errors import ShoalError, first_line
from shoal.files import TEMPORARY_PREFIX, write_atomic
from shoal.protocol.steps import Rewind
from shoal.rundir import checkpoint_path, checkpoint_steps, void_checkpoints
from shoal.training.model.distributed import World


class CheckpointError(ShoalError):
    """A checkpoint that is missing or does not fit."""

    code = "checkpoint"
    permanent = False


def always() -> bool:
    """The confirmation of a checkpoint that depends on nothing else."""
    return True


def accept_one_process() -> None:
    """One process is a normal way to train; torch warns about it on every save and load."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpoints:
    def __init__(self, directory: Path, world: World, *, keep: int) -> None:
        self.directory = directory
        self._world = world
        self._keep = keep
        self._pending: Future[Any] | None = None
        accept_one_process()
        # Writing goes on while the ranks train: its agreements must not mix with theirs.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._settle(error)
            return
        try:
            self.finish()
        except BaseException as interruption:
            self._settle(interruption)
            raise

    def _settle(self, error: BaseException) -> None:
        """Wait for the writer without the other ranks, as this one may be the only one that ends; its failure becomes a note."""
        try:
            self._wait()
        except Exception as unwritten:
            error.add_note(str(unwritten))

    def steps(self) -> list[int]:
        """Steps that can be resumed, oldest first."""
        return checkpoint_steps(self.directory)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimiser: Optimizer,
        facts: dict[str, Any],
        confirm: Callable[[], bool] = always,
    ) -> Path:
        """Copy step's state aside and return; it is written while training goes on. `finish` waits for it.

        A step that is already there is left alone: training is deterministic. The main rank calls `confirm`, which may block,
        when all bytes are on disk; if it says no, the checkpoint never appears.
        """
        self.finish()
        final = self.path(step)
        if final.exists():
            return final
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        if self._world.is_main:
            self._remove_leftovers()
            temporary.mkdir(parents=True)
            write_atomic(temporary / "trainer.json", json.dumps({"step": step, **facts}, indent=2).encode())
        self._world.barrier()
        weights, moments = _state(model, optimiser)
        staged = async_save(
            {"model": weights, "optimiser": moments},
            checkpoint_id=temporary,
            process_group=self._group,
            no_dist=self._world.size == 1,
        )
        assert isinstance(staged, Future)
        self._pending = _then(staged, lambda: self._complete(temporary, final, confirm))
        return final

    def drop_void(self, rewinds: Sequence[Rewind]) -> list[int]:
        """Remove the checkpoints of versions that a rewind voided, newest first: a kill leaves none behind a removed one."""
        self._remove_leftovers()
        void = void_checkpoints(self.directory, rewinds)
        for step in reversed(void):
            self._remove(step)
        return void

    def finish(self) -> None:
        """Wait until the last save is whole on disk; raises what went wrong with it."""
        if self._wait():
            self._world.barrier()

    def _wait(self) -> bool:
        """Whether there was a save to wait for on this rank."""
        if self._pending is None:
            return False
        try:
            self._pending.result()
        except (CheckpointException, OSError) as error:  # torch's own is no Exception and would pass every handler
            raise CheckpointError(f"The checkpoint in {self.directory} was not written: {first_line(error)}") from error
        finally:
            if self._pending.done():  # not so if the waiting was interrupted
                self._pending = None
        return True

    def _complete(self, temporary: Path, final: Path, confirm: Callable[[], bool]) -> None:
        """Every rank's bytes are synced when rank 0 gets here."""
        if self._world.is_main and confirm():
            os.replace(temporary, final)
            _sync_directory(self.directory)
            self._prune()

    def load(self, step: int, model: nn.Module, optimiser: Optimizer) -> dict[str, Any]:
        """Read step's state into model and optimiser; returns the facts saved with it."""
        path = self.path(step)
        try:
            facts: dict[str, Any] = json.loads((path / "trainer.json").read_bytes())
        except (OSError, ValueError):
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self.directory}.", hint=f"There: {known}."
            ) from None
        if self._world.is_main:
            self._remove_leftovers()
        weights, moments = _state(model, optimiser)
        state: dict[str, Any] = {"model": weights, "optimiser": moments}
        try:
            load_distributed(state, checkpoint_id=path, no_dist=self._world.size == 1)
        except (CheckpointException, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError) as error:
            raise CheckpointError(
                f"The checkpoint {path} cannot be read: {first_line(error)}",
                hint="It belongs to another model or is damaged; remove it to resume from an older one.",
            ) from error
        # What is frozen is in no checkpoint.
        whole = all(parameter.requires_grad for parameter in model.parameters())
        set_state_dict(
            model,
            optimiser,
            model_state_dict=state["model"],
            optim_state_dict=state["optimiser"],
            options=StateDictOptions(strict=whole),
        )
        return facts

    def path(self, step: int) -> Path:
        return checkpoint_path(self.directory, step)

    def _remove_leftovers(self) -> None:
        for leftover in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover)

    def _prune(self) -> None:
        for step in self.steps()[: -self._keep]:
            self._remove(step)

    def _remove(self, step: int) -> None:
        path = self.path(step)
        # Renamed first: a checkpoint that is half removed must not look whole.
        doomed = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def _state(model: nn.Module, optimiser: Optimizer) -> tuple[dict[str, Any], Any]:
    """Trained weights and moments by name. Torch gives a fresh optimiser its moments by an empty step, which must not count as
    one: otherwise a run that is saved before its first update would train differently from one that is not."""
    fresh = not optimiser.state
    weights, moments = get_state_dict(model, optimiser)
    # Torch's own option forgets a frozen parameter that has two names.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            del weights[name]
    if fresh:
        for state in optimiser.state.values():
            state["step"].zero_()
    return weights, moments


def _then(first: "Future[Any]", action: Callable[[], None]) -> "Future[None]":
    """A future that is done when `first` and then `action` are."""
    result: Future[None] = Future()

    def follow(done: "Future[Any]") -> None:
        try:
            done.result()
            action()
            result.set_result(None)
        except BaseException as error:  # raised where the result is waited for
            result.set_exception(error)

    first.add_done_callback(follow)
    return result


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
