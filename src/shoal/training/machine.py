"""What the numbers of a training depend on besides its inputs: build, device, instructions, threads, ranks.

Two trainings with equal facts give equal bits. The trainer leaves its facts beside its checkpoints.
"""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.files import write_atomic

FILE = "machine.json"


@dataclass(frozen=True)
class TrainingMachine:
    torch: str
    device: str
    """Name of the GPU, or the processor's architecture with the instructions that torch uses."""
    threads: int
    ranks: int = 1

    @classmethod
    def here(cls, device: str, ranks: int = 1) -> "TrainingMachine":
        if device != "cpu" and torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
        else:
            name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        return cls(str(torch.__version__), name, torch.get_num_threads(), ranks)

    def save(self, directory: Path) -> None:
        write_atomic(directory / FILE, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, directory: Path) -> "TrainingMachine | None":
        """None where no trainer left any, or something else."""
        try:
            fields = json.loads((directory / FILE).read_bytes())
            return cls(str(fields["torch"]), str(fields["device"]), int(fields["threads"]), int(fields["ranks"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __str__(self) -> str:
        return f"torch {self.torch}, {self.device}, {self.threads} threads, {self.ranks} ranks"
