"""The half of the vLLM engine that lives inside vLLM's worker process: one worker extension and one logits processor.

The logits processor samples every token with the seeded noise of `shoal.proofs.sampling` and leaves vLLM's greedy sampler no
other choice. The extension installs one forward hook on the layer that turns states into logits: the first call of a step
brings the states of the sampled rows, further ones (prompt log-probabilities) those of a request that is scored. Nothing of
vLLM is replaced. With tensor parallelism the logits exist on rank 0 only, so rank 0 samples and commits.

Shapes: R rows of one step, N prompt positions, D hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor as LogitsLayer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from shoal.policy.directory import weight_files
from shoal.policy.exactness import use_exact_products
from shoal.policy.vllm.recorder import Collected, Recorder, ScoredBytes
from shoal.proofs.sampling import choose_tokens, token_margins

EXTRA = "shoal"
"""Key of our entry in `SamplingParams.extra_args`."""


class _Step:
    """What the hook and the logits processor, which vLLM makes independently, know about the current step."""

    def __init__(self) -> None:
        self.sampled_states: Tensor | None = None
        self.recorder: Recorder | None = None
        self.scored: dict[int, ScoredBytes] = {}


_step = _Step()


class SeededSampling(LogitsProcessor):  # type: ignore[misc]  # vLLM is not installed where types are checked
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[dict[str, Any] | None, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        _step.sampled_states = None
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output in batch_update.added:
            ours = (params.extra_args or {}).get(EXTRA)
            self._rows[row] = (ours, output)
            if ours is not None and ours.get("first") and _step.recorder is not None:
                _step.recorder.begin(ours["number"], ours["first"], ours["carried"])
        for source, target, direction in batch_update.moved:
            self._move(source, target, swap=direction == MoveDirectionality.SWAP)

    def _move(self, source: int, target: int, *, swap: bool) -> None:
        moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if swap and replaced is not None:
            self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        rows = [row for row, (ours, _) in sorted(self._rows.items()) if ours is not None and "position" not in ours]
        if not rows or _step.recorder is None:
            return logits
        ours: list[dict[str, Any]] = [self._rows[row][0] or {} for row in rows]
        positions = [entry["first"] + len(self._rows[row][1]) for row, entry in zip(rows, ours, strict=True)]
        seeds_R = torch.tensor([entry["seed"] for entry in ours], device=logits.device)
        positions_R = torch.tensor(positions, device=logits.device)
        rows_R = torch.tensor(rows, device=logits.device)
        tokens_R, logprobs_R = choose_tokens(logits[rows_R], seeds_R, positions_R, ours[0]["temperature"])
        assert _step.sampled_states is not None, "the hook runs before the sampler"
        states_RD = _step.sampled_states[rows_R]
        _step.recorder.record([entry["number"] for entry in ours], positions, states_RD, logprobs_R)
        logits[rows_R] = float("-inf")
        logits[rows_R, tokens_R] = 0.0
        return logits


class WorkerExtension:
    """Mixed into vLLM's worker class; method names carry a prefix because vLLM refuses clashes."""

    rank: int
    device: torch.device
    model_runner: Any

    def shoal_install(self) -> None:
        use_exact_products(self.device)
        layers = [module for module in self.model_runner.get_model().modules() if isinstance(module, LogitsLayer)]
        if len(layers) != 1:
            raise RuntimeError(f"expected one layer that makes logits, found {len(layers)}")
        if self.rank == 0:
            _step.recorder = Recorder()
            self._shoal_called(layers[0]).register_forward_hook(self._shoal_hook)

    def _shoal_called(self, layer: nn.Module) -> nn.Module:
        """What vLLM calls for logits: with LoRA a layer around this one, which takes over its forward."""
        around = (
            each for each in self.model_runner.get_model().modules() if getattr(each, "base_layer", None) is layer
        )
        return next(around, layer)

    def shoal_load(self, directory: str) -> None:
        use_exact_products(self.device)
        worker: Any = self
        worker.reload_weights(weights_iterator=_tensors(Path(directory)))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                # A tied head shares the reloaded tensor, but not what was derived from it, such as a reordered copy.
                module.quant_method.process_weights_after_loading(module)

    def shoal_collect(self, numbers: Sequence[int]) -> Collected | None:
        if _step.recorder is None:
            return None
        scored = {number: _step.scored.pop(number) for number in numbers if number in _step.scored}
        return Collected(_step.recorder.collect(numbers), scored)

    def _shoal_hook(self, _layer: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> None:
        states = inputs[1]
        if _step.sampled_states is None:
            _step.sampled_states = states
        else:
            self._shoal_score(states, logits)

    def _shoal_score(self, states_ND: Tensor, logits_NV: Tensor) -> None:
        """vLLM asks for the logits of one request's prompt; the place of its states in the step says which one."""
        runner = self.model_runner
        offset = states_ND.storage_offset() // states_ND.shape[1]
        starts = runner.query_start_loc.np[: runner.input_batch.num_reqs].tolist()
        request = runner.requests[runner.input_batch.req_ids[starts.index(offset)]]
        ours = (request.sampling_params.extra_args or {}).get(EXTRA)
        prompt = request.prompt_token_ids
        if ours is None or request.num_computed_tokens != 0 or states_ND.shape[0] != len(prompt) - 1:
            raise RuntimeError("a scored request was not prefilled in one piece")
        # The state at a place predicts the token after it; only sampled tokens are scored.
        places = torch.tensor(ours["places"], device=states_ND.device) + ours["position"]
        tokens = torch.tensor(prompt, device=states_ND.device)[places + 1]
        positions = torch.arange(len(tokens), device=states_ND.device)
        seeds = torch.full_like(positions, ours["seed"])
        logits = logits_NV[places].float()
        margins, logprobs, rivals = token_margins(logits, seeds, positions, tokens, ours["temperature"])
        states = states_ND[places].to(torch.bfloat16).contiguous().view(torch.int16)
        parts = [part.cpu().numpy().tobytes() for part in (margins, logprobs, states, rivals)]
        _step.scored[ours["number"]] = ScoredBytes(*parts)


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(directory):
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                yield name, reader.get_tensor(name)
