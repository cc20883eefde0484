"""A reward model: a Hugging Face sequence classifier with one output that says which completion of a prompt is better.

Scores mean something only next to each other, so a group is ranked: the value of a completion is its mean Bradley–Terry chance
to win against another one of its group, between 0 and 1. Scores are compared with tolerance and prove nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.errors import first_line
from shoal.files import TOKENIZER_FILE, digest_file
from shoal.policy.batching import length_batches
from shoal.policy.directory import ModelError, read_config, resolve_model

MAX_TOKENS = 16_384
"""Positions of one forward pass."""


class RewardModel:
    def __init__(self, path: str, *, device: str = "cpu", max_tokens: int = MAX_TOKENS) -> None:
        self.model = build_classifier(find_reward_model(path)).to(device).eval()
        self._device, self._max_tokens = torch.device(device), max_tokens

    @torch.inference_mode()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """One unbounded score per sequence of prompt and completion tokens."""
        found = [0.0] * len(sequences)
        lengths = {index: len(sequence) for index, sequence in enumerate(sequences)}
        for chosen in length_batches(lengths, token_limit=self._max_tokens):
            values = classify(self.model, [sequences[index] for index in chosen], self._device)
            for index, value in zip(chosen, values.tolist(), strict=True):
                found[index] = value
        return found

    def rank(self, prompt: Sequence[int], completions: Sequence[Sequence[int]]) -> list[float]:
        """For each completion of a group its mean chance to win against another one; 0.5 for a group of one."""
        return win_chances(self.scores([[*prompt, *completion] for completion in completions]))


def find_reward_model(path: str, tokenizer_digest: str | None = None) -> Path:
    """Its directory; refuses what is no reward model, and one that would read other tokens than the policy writes."""
    directory = resolve_model(path)
    if read_config(directory).num_labels != 1:
        raise ModelError(f"{directory} is no reward model.", hint="`shoal reward-model train` makes one.")
    if tokenizer_digest is not None and digest_file(directory / TOKENIZER_FILE) != tokenizer_digest:
        raise ModelError(
            f"The reward model {path} reads other tokens than the policy writes.",
            hint="Train it from a policy with the run's tokenizer: shoal reward-model train --model …",
        )
    return directory


def win_chances(scores: Sequence[float]) -> list[float]:
    """mean over j ≠ i of σ(s_i − s_j)."""
    if len(scores) < 2:
        return [0.5] * len(scores)
    values = torch.tensor(scores, dtype=torch.float64)
    chances = torch.sigmoid(values[:, None] - values[None, :])
    return [float(value) for value in (chances.sum(1) - 0.5) / (len(scores) - 1)]


def build_classifier(directory: Path) -> Any:
    """A sequence classifier with one output; the backbone of a causal LM gets a new head."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # a head that is new on purpose is no news
    config = read_config(directory)
    config.num_labels = 1
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    try:
        return AutoModelForSequenceClassification.from_pretrained(
            directory, config=config, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{directory} cannot be loaded as a sequence classifier: {first_line(error)}.") from error


def classify(model: Any, sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The single logit of each sequence, read at its last token."""
    lengths_B = torch.tensor([len(sequence) for sequence in sequences], device=device)
    longest = int(lengths_B.max())
    pad = model.config.pad_token_id
    ids_BL = torch.tensor([[*sequence, *[pad] * (longest - len(sequence))] for sequence in sequences], device=device)
    mask_BL = torch.arange(longest, device=device)[None, :] < lengths_B[:, None]
    # The head of the library looks for the last token that is no padding; a completion may end with that very token, so the
    # backbone is asked and the position is ours.
    states_BLD = model.base_model(input_ids=ids_BL, attention_mask=mask_BL.long(), use_cache=False).last_hidden_state
    last_BD = states_BLD[torch.arange(len(sequences), device=device), lengths_B - 1]
    logits_B: Tensor = model.score(last_BD)[:, 0].float()
    return logits_B
