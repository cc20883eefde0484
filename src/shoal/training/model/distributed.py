"""The processes that train together: one, or those that torchrun started.

Everything the trainer needs of `torch.distributed` goes through a `World`, whose operations do nothing when it has one
member. Metric sums and decisions are reduced here, so every rank reports and does the same.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.training.model.determinism import use_deterministic_kernels

COLLECTIVE_TIMEOUT_S = 1800
CPU = torch.device("cpu")


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    node: "dist.ProcessGroup | None" = None
    """The ranks of this node, if there are several."""

    @classmethod
    def join(cls, device: str = "auto") -> "World":
        """The world torchrun describes in the environment, or the world of one process."""
        kind = _device_kind(device)
        size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
        place = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            use_deterministic_kernels()
            torch.cuda.set_device(place)
        if size > 1 and not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        return cls(dist.get_rank(), size, place, _node_group(local_rank)) if size > 1 else cls(0, size, place)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def compute_dtype(self, name: str = "auto") -> torch.dtype:
        """Of matrix products: bfloat16 on a GPU unless the setting says otherwise."""
        automatic = "bfloat16" if self.device.type == "cuda" else "float32"
        return torch.bfloat16 if (automatic if name == "auto" else name) == "bfloat16" else torch.float32

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, holds: bool) -> bool:
        return bool(self.max(torch.tensor(int(holds))))

    @property
    def leads_node(self) -> bool:
        return self.node is None or dist.get_group_rank(self.node, self.rank) == 0

    def share_on_node(self, data: bytes) -> bytes:
        """What the first rank of this node says."""
        if self.node is None:
            return data
        box = [data]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.node, 0), group=self.node, device=CPU)
        return box[0]

    def share(self, text: str) -> str:
        """What the main rank says."""
        box = [text]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, device=CPU)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _reduce(self, values: Tensor, operation: "dist.ReduceOp.RedOpType") -> Tensor:
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, operation)
        return values


def _node_group(local_rank: int) -> "dist.ProcessGroup | None":
    """Every rank takes part in making every node's group; torchrun numbers the ranks of a node one after the other."""
    firsts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(firsts, dist.get_rank() - local_rank)
    own = None
    for first in sorted(set(firsts)):
        ranks = [rank for rank, its_first in enumerate(firsts) if its_first == first]
        group = dist.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        own = group if dist.get_rank() in ranks else own
    return own


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> float:
    """Scales the gradients of all ranks down to the norm `limit`; returns the norm that they had."""
    total = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def _device_kind(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
