"""Training state on disk: whole or absent, the last N, readable at any world size.

A checkpoint is a directory `step-00000012` in torch's distributed format with fully qualified names, so that another number
of ranks can read it, plus `trainer.json`. It is written under a temporary name and renamed when every rank has found its own parts
whole; what a killed process left behind under a temporary name is never read, and removed by the next load or save. The rename
waits for the caller's confirmation on the main rank, so that no checkpoint appears before the version that it holds is settled.
Nodes need no shared disk (`disks.py`). Leaving the context, also by an exception, waits for the writer: nothing writes into the
directory afterwards.
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

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.errors import first_line
from shoal.files import TEMPORARY_PREFIX, write_atomic
from shoal.protocol.steps import Rewind
from shoal.rundir import checkpoint_path, checkpoint_steps, void_checkpoints
from shoal.training.disks import (
    COMMON_FILE,
    LIST_FILE,
    CheckpointError,
    Disk,
    choose_step,
    missing_parts,
    own_parts,
    part_sizes,
)
from shoal.training.model.distributed import World

FACTS_FILE = "trainer.json"
UNREADABLE = (CheckpointException, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, OSError)
"""What torch raises about a checkpoint that is damaged or another model's; the first one is no Exception."""


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
        self._disk = Disk.find(directory, world)

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
        if all(self._disk.gather(final.exists())):
            return final
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}")
        weights, moments = _state(model, optimiser)
        state = {"model": weights, "optimiser": moments}
        if self._disk.leads:
            self._make(temporary, final, {"step": step, "ranks": self._world.size, **facts}, state)
        self._world.barrier()
        staged = async_save(
            state, checkpoint_id=temporary, process_group=self._disk.group, no_dist=self._world.size == 1
        )
        assert isinstance(staged, Future)
        self._pending = _then(staged, lambda: self._complete(temporary, final, confirm))
        return final

    def _make(self, temporary: Path, final: Path, facts: dict[str, Any], state: dict[str, Any]) -> None:
        """The directory on this disk, with all that no rank writes for itself."""
        self._remove_leftovers()
        if final.exists():  # a kill between two renames left it on some disks only
            self._remove(int(facts["step"]))
        temporary.mkdir(parents=True)
        write_atomic(temporary / FACTS_FILE, json.dumps(facts, indent=2).encode())
        if not self._disk.is_shared:
            torch.save(_common(state), temporary / COMMON_FILE)

    def drop_void(self, rewinds: Sequence[Rewind]) -> list[int]:
        """Remove the checkpoints of versions that a rewind voided, newest first: a kill leaves none behind a removed one.

        Every rank calls it; the leader of each disk acts.
        """
        if not self._disk.leads:
            return []
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
        """Torch has synced every rank's bytes. All ranks get here, and none goes on before all have found their parts."""
        is_main, disk = self._world.is_main, self._disk
        listed = disk.together(lambda: (temporary / LIST_FILE).read_bytes() if is_main else b"")[0]
        sizes = disk.together(lambda: part_sizes(temporary) if is_main else {})[0]
        disk.together(lambda: self._verify(temporary, listed, sizes))
        if not disk.together(lambda: confirm() if is_main else True)[0]:
            return
        disk.together(lambda: self._rename(temporary, final))
        if disk.leads:
            self._prune()

    def _verify(self, temporary: Path, listed: bytes, sizes: dict[str, int]) -> None:
        """Raises if parts of this rank are missing; completes the directory on disks that the main rank does not see."""
        if self._disk.leads and not self._disk.is_shared and not self._world.is_main:
            write_atomic(temporary / LIST_FILE, listed)
        if missing := missing_parts(temporary, sizes, own_parts(list(sizes), self._world.rank)):
            raise CheckpointError(f"{temporary} lacks {', '.join(missing)}")

    def _rename(self, temporary: Path, final: Path) -> None:
        if self._disk.leads:
            os.replace(temporary, final)
            _sync_directory(self.directory)

    def choose(self) -> int | None:
        """The step to resume at, the same on every rank; None if no disk has a checkpoint. Raises what is missing."""
        steps = self.steps()
        if self._world.size == 1:
            return steps[-1] if steps else None
        chosen = choose_step(self._disk.gather({step: self._complaint(step) for step in steps}))
        if self._disk.leads:
            for step in [one for one in reversed(steps) if chosen is None or one > chosen]:
                self._remove(step)  # on this disk only: it will be made again
        self._world.barrier()
        return chosen

    def _complaint(self, step: int) -> str:
        """Why this rank cannot read a checkpoint; empty if it can."""
        path = self.path(step)
        try:
            sizes, facts = part_sizes(path), json.loads((path / FACTS_FILE).read_bytes())
        except (OSError, ValueError, EOFError, UnpicklingError, AttributeError) as error:
            return f"{path} is damaged: {first_line(error)}"
        same = facts.get("ranks") == self._world.size and (path / COMMON_FILE).exists()
        needed = own_parts(list(sizes), self._world.rank) if same and not self._disk.is_shared else list(sizes)
        missing = missing_parts(path, sizes, needed)
        return f"{path} lacks {len(missing)} of {len(sizes)} parts, such as {missing[0]}" if missing else ""

    def load(self, step: int, model: nn.Module, optimiser: Optimizer) -> dict[str, Any]:
        """Read step's state into model and optimiser; returns the facts saved with it."""
        path = self.path(step)
        try:
            facts: dict[str, Any] = json.loads((path / FACTS_FILE).read_bytes())
        except (OSError, ValueError):
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self.directory}.", hint=f"There: {known}."
            ) from None
        if self._disk.leads:
            self._remove_leftovers()
        weights, moments = _state(model, optimiser)
        state: dict[str, Any] = {"model": weights, "optimiser": moments}
        try:
            self._read(path, state)
        except UNREADABLE as error:
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

    def _read(self, path: Path, state: dict[str, Any]) -> None:
        """Into `state`, from all parts or, if disks have those of their ranks only, from these and what all have in common."""
        if self._has_all_parts(path):
            load_distributed(state, checkpoint_id=path, no_dist=self._world.size == 1)
            return
        load_distributed(_spread(state), checkpoint_id=path)
        _fill(state, torch.load(path / COMMON_FILE, weights_only=True))

    def _has_all_parts(self, path: Path) -> bool:
        """Whether every disk has; one disk that all ranks share needs not be looked at."""
        if self._disk.is_shared:
            return True
        sizes = part_sizes(path)
        return all(self._disk.gather(not missing_parts(path, sizes, list(sizes))))

    def path(self, step: int) -> Path:
        return checkpoint_path(self.directory, step)

    def _remove_leftovers(self) -> None:
        for leftover in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:  # a mark by which ranks found out who shares their disk
                leftover.unlink(missing_ok=True)

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


def _common(state: dict[str, Any]) -> dict[str, Any]:
    """What is the same on every rank: all but spread tensors, by the same names."""
    return {
        name: _common(value) if isinstance(value, dict) else value
        for name, value in state.items()
        if not isinstance(value, DTensor)
    }


def _spread(state: dict[str, Any]) -> dict[str, Any]:
    """The spread tensors of a nested state; they are read in place."""
    parts = {name: _spread(value) if isinstance(value, dict) else value for name, value in state.items()}
    return {
        name: value
        for name, value in parts.items()
        if isinstance(value, DTensor) or (isinstance(value, dict) and value)
    }


def _fill(state: dict[str, Any], common: dict[str, Any]) -> None:
    for name, value in common.items():
        if isinstance(value, dict):
            _fill(state[name], value)
        else:
            state[name] = value


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
