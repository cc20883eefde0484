"""A run that fits into a test: a random policy of one layer with the bundled tokenizer, a dozen tasks, slots of 2 × 4 samples."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.broadcast import Head, RelayReport
from shoal.broadcast.download import DownloadProgress, OnProgress
from shoal.broadcast.manifest import VersionEntry
from shoal.config import RewardConfig, RolloutConfig, TasksConfig
from shoal.errors import UnavailableError
from shoal.joined import JoinedRun, RelayList
from shoal.policy import TorchEngine, bundled_directory
from shoal.protocol import api
from shoal.protocol.assignment import slot_seed
from shoal.protocol.environments import EnvironmentReference
from shoal.protocol.steps import StepId, step_secret
from shoal.tasks import CODEC_FILES, TextCodec, load_tasks
from shoal.tasks.environments.registry import refer
from shoal.tasks.workload import Workload
from support.samples import NUMERICS_CLASS, RUN_SECRET, descriptor, keypair

WORKER = keypair("worker")
MAX_NEW_TOKENS = 40
"""More than one chunk of 32 states."""


def save_policy(directory: Path, *, seed: int, weights_only: bool = False, heads: int = 2) -> Path:
    """Random weights with opinions, in bf16 as on the wire; other seeds are other versions of the same policy.

    vLLM has kernels for heads of 32 and more: one head.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.to(torch.bfloat16).save_pretrained(directory)
    if weights_only:
        (directory / "config.json").unlink()
        (directory / "generation_config.json").unlink()
        return directory
    for name in CODEC_FILES:
        if (bundled_directory() / name).is_file():
            shutil.copy(bundled_directory() / name, directory / name)
    return directory


def version_digest(version: int) -> str:
    return f"{version:064x}"


@dataclass
class DiskWeights:
    """Takes the place of a WeightClient: versions are directories that already exist."""

    versions: dict[int, Path]
    published: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    closed: bool = False

    def reports(self) -> list[RelayReport]:
        return []

    def head(self, *, newer_than: int | None = None, wait_s: float = 0, deadline_s: float = 30) -> Head:
        if self.closed or not self.published:
            raise UnavailableError("No relay showed a valid head.")
        entries = [VersionEntry(version=version, manifest_digest=version_digest(version)) for version in self.published]
        return Head(
            run_id="run-1", counter=len(self.published), expires_at=2e9, ledger_head="0" * 64, versions=tuple(entries)
        )

    def fetch_newest(
        self, *, deadline_s: float = 600, on_progress: OnProgress | None = None
    ) -> tuple[VersionEntry, Path]:
        newest = self.head().versions[-1]
        return newest, self.fetch_version(newest.version, newest.manifest_digest, on_progress=on_progress)

    def fetch_version(
        self,
        version: int,
        manifest_digest: str,
        *,
        deadline_s: float = 600,
        within_s: float = math.inf,
        on_progress: OnProgress | None = None,
    ) -> Path:
        if self.closed or manifest_digest != version_digest(version) or version not in self.versions:
            raise UnavailableError(f"No relay delivered version {version}.")
        self.fetched.append(version)
        if on_progress is not None:
            on_progress(DownloadProgress(version, 1_400_000, bytes_done=1_000_000))
        return self.versions[version]

    def close(self) -> None:
        self.closed = True


@dataclass
class TinyRun:
    root: Path
    policies: dict[int, Path]
    """Two versions of the policy."""
    workload: Workload
    _engines: dict[int, TorchEngine] = field(default_factory=dict)

    def engine(self, version: int = 0) -> TorchEngine:
        """A shared engine that holds a version; nobody may load other weights into it."""
        if version not in self._engines:
            self._engines[version] = self.new_engine()
            self._engines[version].load(self.policies[version])
        return self._engines[version]

    def new_engine(self) -> TorchEngine:
        return TorchEngine(self.root / "model", eos_token_ids=self.workload.codec.eos_token_ids)

    def weights(self, *published: int) -> DiskWeights:
        return DiskWeights(self.policies, list(published))

    def joined(self, weights: Any) -> JoinedRun:
        run = self.workload.descriptor
        return JoinedRun(run, self.workload, weights, RelayList(run), self.root / "model")


TALKATIVE_ENDS = (1, *range(30, 70))
"""End tokens of a policy whose turns are short: a random one hardly ever samples the only one."""


def make_tiny_run(
    root: Path, *, environment: str = "", heads: int = 2, numerics_class: str = NUMERICS_CLASS, **limits: int
) -> TinyRun:
    """With an environment: episodes of several short turns."""
    model = save_policy(root / "model", seed=0, heads=heads)
    references: tuple[EnvironmentReference, ...] = ()
    if environment:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(TALKATIVE_ENDS)}))
        found = refer(environment)
        references = (found.model_copy(update={"limits": found.limits.model_copy(update=limits)}),)
    policies = {
        version: save_policy(root / f"v{version}", seed=version, weights_only=True, heads=heads) for version in (0, 1)
    }
    (model / "model.safetensors").unlink()
    tasks = TasksConfig(count=12, heldout=6, environment=environment)
    sets = load_tasks(tasks)
    run = descriptor(
        tasks=tasks,
        task_set_digest=sets.train.digest,
        task_count=len(sets.train),
        environments=references,
        rollouts=RolloutConfig(
            group_size=4,
            tasks_per_slot=2,
            max_prompt_tokens=64,
            max_new_tokens=4 * MAX_NEW_TOKENS if environment else MAX_NEW_TOKENS,
            temperature=1.0,
        ),
        reward=RewardConfig(target_lengths=(16, 32), length_alpha=0.003),
        numerics_classes=(numerics_class,),
    )
    return TinyRun(root, policies, Workload(run, TextCodec.from_directory(model), sets))


def make_lease(slot: int = 0, *, step: int = 3, version: int = 0, expires_at: float = 2e9) -> api.Lease:
    return api.Lease(
        lease_id=f"lease-{step}-{slot}",
        step=step,
        slot=slot,
        slot_seed=slot_seed(step_secret(RUN_SECRET, StepId(step=step)), slot).hex(),
        policy_version=version,
        manifest_digest=version_digest(version),
        expires_at=expires_at,
    )


class Reports(list[str]):
    """Collects what a role says."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._changed:
            self.append(text)
            self._changed.notify_all()

    def wait_for(self, words: str, timeout_s: float = 30.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.some(words), timeout_s)

    def some(self, words: str) -> bool:
        return any(words in line for line in self)


def replaced(items: Sequence[Any], index: int, change: Callable[[Any], Any]) -> list[Any]:
    return [change(item) if number == index else item for number, item in enumerate(items)]
