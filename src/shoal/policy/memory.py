"""What an engine needs and what there is, decided before anything is allocated.

A plan that does not fit is refused with all its numbers, so that the reader sees which setting to change. Staging is the one copy
of the largest tensor that a weight swap reads beside the live weights.
"""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.errors import ShoalError

# Activations, logits and the rest of the process live in what the cache leaves over.
_CACHE_SHARE = 0.7


_limit_bytes = 0


class NotEnoughMemoryError(ShoalError):
    """Weights and cache do not fit."""

    code = "memory"
    permanent = False


class ShareTooSmallError(NotEnoughMemoryError):
    """They do not fit into what the contributor gives, which no restart changes."""

    code = "memory_share"
    permanent = True


@dataclass(frozen=True)
class CachePlan:
    weights_bytes: int
    row_bytes: int
    """Cache of one sequence of the longest length."""
    available_bytes: int

    def __str__(self) -> str:
        return (
            f"weights {_mib(self.weights_bytes)}, cache {_mib(self.row_bytes)} per sequence, "
            f"available {_mib(self.available_bytes)}"
        )


def cache_rows(plan: CachePlan, wanted: int) -> int:
    """How many sequences fit beside the weights, which are already there; at least one must."""
    fitting = int(plan.available_bytes * _CACHE_SHARE) // plan.row_bytes
    if fitting < 1:
        raise _refusal(
            f"Not enough memory to generate ({plan}).", "Lower max_new_tokens or use a smaller model or dtype."
        )
    return min(wanted, fitting)


def check_weights(
    weights_bytes: int, staging_bytes: int, available_bytes: int, what: str, *, cache_bytes: int | None = None
) -> None:
    """`cache_bytes` is None where the cache takes what the weights leave over."""
    if weights_bytes + staging_bytes + (cache_bytes or 0) > available_bytes:
        cache = "cache on top of that" if cache_bytes is None else f"cache {_mib(cache_bytes)}"
        raise _refusal(
            f"Not enough memory for {what} (weights {_mib(weights_bytes)}, staging {_mib(staging_bytes)}, "
            f"{cache}, available {_mib(available_bytes)}).",
            "Use a smaller model or dtype, or another machine.",
        )


def _refusal(message: str, hint: str) -> NotEnoughMemoryError:
    if not _limit_bytes:
        return NotEnoughMemoryError(message, hint=hint)
    given = f"--memory {_limit_bytes / 1e9:g}"
    return ShareTooSmallError(message, hint=f"{given} is too little for this policy; allow more, or leave it out.")


def limit_memory(size_bytes: int) -> None:
    """Most host memory that engines of this process plan with; 0 is no limit."""
    global _limit_bytes
    _limit_bytes = size_bytes


def available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = _free_bytes()
    return min(free, max(0, _limit_bytes - memory_in_use())) if _limit_bytes else free


def memory_in_use() -> int:
    """Most bytes that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    entry = next(line for line in lines if line.startswith("MemAvailable:"))
    return int(entry.split()[1]) * 1024


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
