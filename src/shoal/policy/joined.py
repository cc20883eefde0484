"""Everything a role builds from the run descriptor: workload, model files on disk, and a client for the weights.

Nothing is taken on trust: files come from relays by digest, versions are verified, and the live list of relays is only a
list of places to look.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.broadcast import WeightClient
from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.metrics import Metrics
from shoal.policy.engine import Engine
from shoal.policy.torch_engine import TorchEngine
from shoal.protocol.descriptor import RunDescriptor
from shoal.tasks import CODEC_FILES
from shoal.tasks.workload import Workload

MAX_MODEL_FILE_BYTES = 64 << 20
FILE_DEADLINE_S = 60.0


class RelayList:
    """The relays that the coordinator last named; before that, and when none lives, those of the descriptor."""

    def __init__(self, descriptor: RunDescriptor) -> None:
        self._fallback = descriptor.relay_urls
        self._live: Sequence[str] = ()

    def update(self, urls: Sequence[str]) -> None:
        self._live = tuple(urls)

    def __call__(self) -> Sequence[str]:
        return self._live or self._fallback


@dataclass(frozen=True)
class JoinedRun:
    descriptor: RunDescriptor
    workload: Workload
    weights: WeightClient
    relays: RelayList
    model_files: Path
    """config.json and tokenizer of the base model; no weights."""

    def make_engine(self, kind: str = "torch") -> Engine:
        return make_engine(kind, self.model_files, self.workload.codec.eos_token_ids)


def _torch_engine(model_files: Path, eos_token_ids: Sequence[int]) -> Engine:
    return TorchEngine(model_files, eos_token_ids=eos_token_ids)


def _vllm_engine(model_files: Path, eos_token_ids: Sequence[int]) -> Engine:
    from shoal.policy.vllm_engine import VllmEngine

    return VllmEngine(model_files, eos_token_ids=eos_token_ids)


ENGINES: dict[str, Callable[[Path, Sequence[int]], Engine]] = {"torch": _torch_engine, "vllm": _vllm_engine}


def make_engine(kind: str, model_files: Path, eos_token_ids: Sequence[int]) -> Engine:
    """The engine of that name on a model directory; it has weights if the directory has them."""
    if kind not in ENGINES:
        raise ConfigError(f"There is no engine {kind!r}.", hint=f"Known: {', '.join(ENGINES)}.")
    return ENGINES[kind](model_files, eos_token_ids)


def join_run(
    descriptor: RunDescriptor, cache_dir: Path, *, keep_versions: int | None = None, metrics: Metrics | None = None
) -> JoinedRun:
    """Fetches what the descriptor names into the cache; a second join of the same run fetches nothing."""
    relays = RelayList(descriptor)
    weights = WeightClient(
        descriptor.run_key,
        relays,
        cache_dir,
        run_id=descriptor.run_id,
        keep_versions=keep_versions or descriptor.async_level + 2,
        metrics=metrics,
    )
    files = {
        name: weights.fetch_file(
            reference.digest, max_bytes=min(reference.bytes, MAX_MODEL_FILE_BYTES), deadline_s=FILE_DEADLINE_S
        )
        for name, reference in descriptor.model_files.items()
    }
    workload = Workload.build(descriptor, {name: files[name] for name in CODEC_FILES if name in files})
    model_files = cache_dir / "model" / descriptor.run_key[:16]
    for name, data in files.items():
        write_atomic(model_files / name, data)
    return JoinedRun(descriptor, workload, weights, relays, model_files)
