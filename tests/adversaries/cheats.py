"""Cheating workers, each in the strongest version that we can write.

A cheat takes slots and returns what it would upload for them. Anyone who samples wrongly proves with the true policy where that
helps: commitments, log-probabilities and rewards then fit the false tokens, and only the draw can give it away.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from adversaries.arena import Arena, save_version
from shoal.files import WEIGHTS_FILE
from shoal.policy import build_model
from shoal.policy.engine import GenerationRequest, ScoreRequest
from shoal.proofs import build_proofs, sampling, split_chunks
from shoal.protocol.rollouts import Rollout
from shoal.validation.calibration.forgeries import Forge, quantised
from support.submissions import Submission
from support.tiny_run import replaced

Cheat = Callable[[Arena, Sequence[int]], list[Submission]]
NOT_A_TIE = 0.05
"""An edited token must have lost by more than this to count as edited."""
EDIT_CANDIDATES = 16
"""Rows among which an edit looks for its best place."""


# Other policies


def with_model(make: Callable[[Arena], Path], *, prove: bool = False, temperature: float = 1.0) -> Cheat:
    def cheat(arena: Arena, slots: Sequence[int]) -> list[Submission]:
        sent = arena.sampled_once(slots, make(arena), temperature * arena.temperature)
        return [arena.proved(submission) for submission in sent] if prove else sent

    return cheat


def made_once(name: str, make: Callable[[Arena, Path], None]) -> Callable[[Arena], Path]:
    def directory(arena: Arena) -> Path:
        path = arena.root / name
        if not path.exists():
            make(arena, path)
        return path

    return directory


def reweighted(forge: Forge) -> Callable[[Arena, Path], None]:
    def make(arena: Arena, path: Path) -> None:
        save_version(path, build_model(arena.policy), arena.policy)
        save_file(forge(load_file(arena.policy / WEIGHTS_FILE)), path / WEIGHTS_FILE, metadata={"format": "pt"})

    return make


def without_last_layer(arena: Arena, path: Path) -> None:
    """A third cheaper: the true policy without its last layer."""
    save_version(path, build_model(arena.policy), arena.policy)
    config = json.loads((path / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": last}))
    tensors = {name: value for name, value in load_file(path / WEIGHTS_FILE).items() if f".layers.{last}." not in name}
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt"})


def fine_tuned(arena: Arena, path: Path) -> None:
    """Three supervised steps away from the true policy, towards shorter answers."""
    model = build_model(arena.policy)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for submission in arena.honest([0, 1, 2]):
        rows = sorted(submission.rollouts, key=lambda row: len(row.output_tokens))[:8]
        optimiser.zero_grad()
        for row in rows:
            tokens = torch.tensor([[*row.input_tokens, *row.output_tokens]])
            logits = model(tokens).logits[0, len(row.input_tokens) - 1 : -1]
            loss = torch.nn.functional.cross_entropy(logits, tokens[0, len(row.input_tokens) :]) / len(rows)
            loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    save_version(path, model, arena.policy)


def stale(versions: int) -> Cheat:
    return with_model(lambda arena: arena.versions[-1 - versions])


def stale_true_proofs(versions: int) -> Cheat:
    """Saves the swap: samples on with old weights, proves with the new ones."""
    return with_model(lambda arena: arena.versions[-1 - versions], prove=True)


INT8 = made_once("int8", reweighted(quantised(8)))
INT4 = made_once("int4", reweighted(quantised(4)))
SMALLER = made_once("smaller", without_last_layer)
FINE_TUNED = made_once("fine-tuned", fine_tuned)


# Other sampling from the true policy


def at_temperature(factor: float) -> Cheat:
    """The states are the true policy's; so are the log-probabilities that it claims."""
    return with_model(lambda arena: arena.policy, prove=True, temperature=factor)


@contextmanager
def cutting(keep: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Engines draw only among the tokens that `keep` marks, with the true noise."""
    honest = sampling.choose_tokens

    def choose(
        logits_NV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        temperature: float,
        *,
        rows_R: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_RV = (logits_NV if rows_R is None else logits_NV[rows_R]).float()
        cut = logits_RV.masked_fill(~keep(logits_RV / temperature), -1e9)
        tokens_R, _ = honest(cut, seeds_R, positions_R, temperature)
        claimed_R = torch.log_softmax(logits_RV / temperature, -1).gather(-1, tokens_R[:, None]).squeeze(-1)
        return tokens_R, claimed_R

    with mock.patch("shoal.policy.embedded.decode_batch.choose_tokens", choose):
        yield


def top_k(scaled_RV: torch.Tensor) -> torch.Tensor:
    return scaled_RV >= scaled_RV.topk(4, dim=-1).values[:, -1:]


def top_p(scaled_RV: torch.Tensor) -> torch.Tensor:
    probabilities = scaled_RV.softmax(-1)
    values, order = probabilities.sort(dim=-1, descending=True)
    kept = values.cumsum(-1) - values < 0.95
    return torch.zeros_like(kept).scatter(-1, order, kept)


def cut_sampling(keep: Callable[[torch.Tensor], torch.Tensor]) -> Cheat:
    def cheat(arena: Arena, slots: Sequence[int]) -> list[Submission]:
        with cutting(keep):
            cut = arena.sampled(slots, arena.engine())
        # Where the cut changed no token, last places of log-probabilities are no cheat.
        return [
            honest if tokens_of(sent) == tokens_of(honest) else sent
            for sent, honest in zip(cut, arena.honest(slots), strict=True)
        ]

    return cheat


def tokens_of(sent: Submission) -> list[list[int]]:
    return [row.output_tokens for row in sent.rollouts]


def best_of(count: int) -> Cheat:
    """Draws each sample with several seeds and keeps the best; everything it shows is true but for the seed."""

    def cheat(arena: Arena, slots: Sequence[int]) -> list[Submission]:
        engine, limit = arena.engine(), arena.workload.descriptor.rollouts.max_new_tokens
        items = [item for slot in slots for item in arena.items(slot)]
        best = [row for honest in arena.honest(slots) for row in honest.rollouts]
        for salt in range(1, count):
            requests = [GenerationRequest(item.prompt_tokens, item.seed ^ salt, limit) for item in items]
            drawn = engine.generate(requests, temperature=arena.temperature)
            others = [arena.rollout(item, done) for item, done in zip(items, drawn, strict=True)]
            best = [max(pair, key=lambda row: row.reward) for pair in zip(best, others, strict=True)]
        size = len(best) // len(slots)
        return [
            replace(honest, rollouts=best[number * size : (number + 1) * size])
            for number, honest in enumerate(arena.honest(slots))
        ]

    return cheat


# Edits of honest work


def edits(change: Callable[[Arena, Submission], Submission]) -> Cheat:
    return lambda arena, slots: [change(arena, submission) for submission in arena.honest(slots)]


def copied_answer(arena: Arena, sent: Submission) -> Submission:
    """A wrong answer becomes a right sibling's: the same prompt, so that states, proofs and reward are all true."""
    for index, row in enumerate(sent.rollouts):
        right = [other for other in sent.rollouts if other.group == row.group and other.task_reward > row.task_reward]
        if right:
            return sent.changed(index, lambda row, right=right: replace(right[0], sample=row.sample))  # type: ignore[misc]
    return sent


def one_token(arena: Arena, sent: Submission) -> Submission:
    """The last token before the end, where the closest token that is not a rounding flip is closest; proved again."""
    changes = [
        (index, _with_token(row.output_tokens, -2, _other_token(arena, row.output_tokens[-2], shift)))
        for index, row in enumerate(sent.rollouts[:EDIT_CANDIDATES])
        if len(row.output_tokens) > 2
        for shift in (1, 2, 3)
    ]
    index, tokens = _closest(arena, sent, changes, place=-2)
    return arena.proved(sent.with_row(index, output_tokens=tokens))


def _closest(
    arena: Arena, sent: Submission, changes: Sequence[tuple[int, list[int]]], place: int
) -> tuple[int, list[int]]:
    """The change whose token at `place` loses by least, rounding flips left out: a row number and its new tokens."""
    items = arena.items(sent.lease.slot)
    requests = [ScoreRequest(items[index].prompt_tokens, tuple(tokens), items[index].seed) for index, tokens in changes]
    scored = arena.validator.score(requests, temperature=arena.temperature)
    margins = [float(row.margins[place]) for row in scored]
    _, number = min((margin, number) for number, margin in enumerate(margins) if margin > NOT_A_TIE)
    return changes[number]


def _with_token(tokens: Sequence[int], index: int, token: int) -> list[int]:
    changed = list(tokens)
    changed[index] = token
    return changed


def _other_token(arena: Arena, token: int, shift: int) -> int:
    """A neighbour in the vocabulary that does not end the answer."""
    others = [token + step for step in range(1, 9) if token + step not in arena.workload.codec.eos_token_ids]
    return others[shift] % arena.validator.vocab_size


def _longest(sent: Submission) -> int:
    return max(range(len(sent.rollouts)), key=lambda number: len(sent.rollouts[number].output_tokens))


def forced_end(arena: Arena, sent: Submission) -> Submission:
    """Ends the longest completion early with an end token, where that loses by least; proved again."""
    index = _longest(sent)
    tokens = sent.rollouts[index].output_tokens
    eos = arena.workload.codec.eos_token_ids[0]
    changes = [(index, [*tokens[:count], eos]) for count in range(1, len(tokens) - 1)]
    index, tokens = _closest(arena, sent, changes, place=-1)
    return arena.proved(sent.with_row(index, output_tokens=tokens))


def early_stop(arena: Arena, sent: Submission) -> Submission:
    """Cuts one completion off and calls it complete."""
    index = _longest(sent)
    tokens = sent.rollouts[index].output_tokens
    return arena.proved(sent.with_row(index, output_tokens=tokens[: len(tokens) // 2]))


# Forged proofs and claims


def every_row(change: Callable[[Rollout], Rollout]) -> Cheat:
    return edits(lambda arena, sent: replace(sent, rollouts=[change(row) for row in sent.rollouts]))


def constant_polynomials(row: Rollout) -> Rollout:
    return replace(row, proofs=[proof[:4] + bytes(len(proof) - 4) for proof in row.proofs])


def channel_means(arena: Arena, sent: Submission) -> Submission:
    """Commits to the mean state of many tokens: no degenerate polynomial, right signs and magnitudes on average."""
    scored = arena.score(sent)
    mean = torch.cat([row.states for row in scored]).float().mean(0).to(torch.bfloat16)
    rows = [
        replace(row, proofs=build_proofs(split_chunks(mean.expand(len(row.output_tokens), -1).contiguous())))
        for row in sent.rollouts
    ]
    return replace(sent, rollouts=rows)


def neighbours(slots: Sequence[int]) -> list[int]:
    """For each slot another one, of the same ones if there are several."""
    return [*slots[1:], slots[0]] if len(slots) > 1 else [slots[0] + 1]


def proofs_of_another(arena: Arena, slots: Sequence[int]) -> list[Submission]:
    """The proofs of the neighbour slot, wherever their sizes fit."""
    mine, others = arena.honest(slots), arena.honest(neighbours(slots))

    def swapped(row: Rollout, other: Rollout) -> Rollout:
        pairs = zip(row.proofs, [*other.proofs, *row.proofs[len(other.proofs) :]], strict=False)
        return replace(row, proofs=[theirs if len(theirs) == len(own) else own for own, theirs in pairs])

    return [
        replace(sent, rollouts=[swapped(a, b) for a, b in zip(sent.rollouts, other.rollouts, strict=True)])
        for sent, other in zip(mine, others, strict=True)
    ]


def permuted_rows(arena: Arena, sent: Submission) -> Submission:
    """Two completions of one group change places, with fitting sample numbers: prompts and rewards still agree."""
    rows = list(sent.rollouts)
    for first, second in pairwise(range(len(rows))):
        a, b = rows[first], rows[second]
        if a.group == b.group and a.output_tokens != b.output_tokens:
            rows[first], rows[second] = replace(b, sample=a.sample), replace(a, sample=b.sample)
            return replace(sent, rollouts=rows)
    return sent


def other_prompt(arena: Arena, sent: Submission) -> Submission:
    last = sent.rollouts[-1]
    return sent.with_row(0, input_tokens=last.input_tokens)


def false_reward(arena: Arena, sent: Submission) -> Submission:
    wrong = next((index for index, row in enumerate(sent.rollouts) if row.task_reward < 1), None)
    if wrong is None:
        return sent
    return sent.changed(wrong, lambda row: replace(row, task_reward=1.0, reward=1.0 - row.length_penalty))


def false_logprobs(row: Rollout) -> Rollout:
    return replace(row, output_logprobs=[0.99 * value - 0.002 for value in row.output_logprobs])


def missing_proof(arena: Arena, sent: Submission) -> Submission:
    return Submission(
        sent.lease, sent.header, replaced(sent.rollouts, 0, lambda row: replace(row, proofs=row.proofs[:-1]))
    )


def extra_proof(arena: Arena, sent: Submission) -> Submission:
    return sent.changed(0, lambda row: replace(row, proofs=[*row.proofs, row.proofs[0]]))


def replayed(arena: Arena, slots: Sequence[int]) -> list[Submission]:
    """Yesterday's file for today's lease."""
    return [
        replace(new, header=old.header, rollouts=old.rollouts)
        for new, old in zip(arena.honest(slots), arena.honest(neighbours(slots)), strict=True)
    ]


def shopped(arena: Arena, slots: Sequence[int]) -> list[Submission]:
    """Drops the slot it was given and uploads a better one under its lease: honest work, of the wrong slot."""
    return [
        replace(new, rollouts=other.rollouts)
        for new, other in zip(arena.honest(slots), arena.honest(neighbours(slots)), strict=True)
    ]


CHEATS: dict[str, Cheat] = {
    "smaller_model": with_model(SMALLER),
    "smaller_model_true_proofs": with_model(SMALLER, prove=True),
    "fine_tuned": with_model(FINE_TUNED),
    "stale_by_1": stale(1),
    "stale_by_5": stale(5),
    "stale_by_1_true_proofs": stale_true_proofs(1),
    "int4": with_model(INT4),
    "int4_true_proofs": with_model(INT4, prove=True),
    "temperature_x0.7": at_temperature(0.7),
    "temperature_x1.3": at_temperature(1.3),
    "top_k_4": cut_sampling(top_k),
    "top_p_0.95": cut_sampling(top_p),
    "copied_answer": edits(copied_answer),
    "one_token": edits(one_token),
    "forced_end": edits(forced_end),
    "early_stop": edits(early_stop),
    "best_of_2": best_of(2),
    "shopped_slot": shopped,
    "constant_polynomials": every_row(constant_polynomials),
    "channel_means": edits(channel_means),
    "proofs_of_another": proofs_of_another,
    "permuted_rows": edits(permuted_rows),
    "other_prompt": edits(other_prompt),
    "false_reward": edits(false_reward),
    "false_logprobs": every_row(false_logprobs),
    "missing_proof": edits(missing_proof),
    "extra_proof": edits(extra_proof),
    "replayed_file": replayed,
}
SLOW_CHEATS: dict[str, Cheat] = {
    "int8": with_model(INT8),
    "int8_true_proofs": with_model(INT8, prove=True),
    "temperature_x0.9": at_temperature(0.9),
    "temperature_x1.1": at_temperature(1.1),
}
"""Deviations so small that one submission may not show them."""
