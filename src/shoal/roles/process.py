"""What role processes do at their start: fix their compute threads, and find a directory that no other process uses."""

import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import get_args

from shoal.config.schema import EngineKind
from shoal.errors import ConfigError
from shoal.files import remove_all_leftovers
from shoal.locks import BusyError, hold

MAX_PER_HOST = 64
COORDINATOR_OUTAGE_S = 3600.0
"""How long a role waits for a coordinator that is away before it ends."""


@contextmanager
def own_directory(root: Path, kind: str) -> Iterator[Path]:
    """The first of kind, kind-2, kind-3 … that no process uses: several of a kind on one host share nothing but the run."""
    for number in range(1, MAX_PER_HOST + 1):
        place = root / (kind if number == 1 else f"{kind}-{number}")
        with ExitStack() as held:
            try:
                held.enter_context(hold(place / "lock", f"Another {kind} uses {place}."))
            except BusyError:
                continue
            remove_all_leftovers(place)
            yield place
            return
    raise BusyError(f"{MAX_PER_HOST} processes work as {kind} in {root}.", hint="Start more on other hosts.")


def check_engine(kind: str) -> None:
    """Refuses an engine that is not there before anything is asked or fetched."""
    if kind not in get_args(EngineKind):
        raise ConfigError(f"There is no engine {kind!r}.", hint=f"Known: {', '.join(get_args(EngineKind))}.")
    if kind == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError("vLLM is not installed here.", hint="Install it, or use --engine torch.")


def keep_what_is_loaded() -> None:
    """Before the work begins: no collection looks again at what libraries and the model brought. It would stop this process for a
    third of a second, in the middle of a step."""
    gc.collect()
    gc.freeze()


def use_threads(threads: int) -> None:
    """Fixes the number of compute threads before torch starts its pools; 0 leaves the choice to torch."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)
        if torch.get_num_interop_threads() != 1:  # may be set once in a process
            torch.set_num_interop_threads(1)
