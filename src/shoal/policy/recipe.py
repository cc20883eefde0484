"""Rebuilds the bundled policy: `python -m shoal.policy.recipe` (or `make bundled`).

A tokenizer, worked solutions of chain sums, and a supervised tiny Llama that first learns the arithmetic from clean
solutions and then, from careless ones, the habit of slipping at any step. The result knows the procedure but samples a wrong
answer two times out of three: something for reinforcement learning to sharpen. Held-out problems never enter the data.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config import TasksConfig
from shoal.files import write_atomic
from shoal.tasks import THINK_CLOSE, THINK_OPEN, TaskSet, TextCodec, load_tasks, score
from shoal.tasks.chain_sums import ChainSum, as_task, draw_chain_sum

DIRECTORY = Path(__file__).parent / "bundled"
VOCABULARY = 320
PAD, END = "<|pad|>", "<|end|>"
CONTROL_TOKENS = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
INSTRUCTION = TasksConfig().length_instruction
STYLE_LENGTHS = {"plain": 21, "checked": 30}
MAX_NEW_TOKENS = 40
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    intermediate: int = 384
    clean_steps: int = 2000
    careless_steps: int = 300
    batch: int = 64
    learning_rate: float = 2e-3
    slip: float = 0.30
    """Probability of an error at each step of a careless solution."""
    heed: float = 0.8
    """Probability that a careless solution has the length that was asked for."""
    seed: int = 0


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text has tokens, digits stand alone, the fixed words of the prompt become long tokens."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    # Merges may cross words: the instruction then costs the tiny model two tokens instead of ten.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [f"Compute 1+2-3. {INSTRUCTION}".replace("{target}", "4")] * 4 + [
        "Answer with an integer.",
        "Compute 1-2.",
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in (THINK_OPEN, THINK_CLOSE)])
    assert tokenizer.get_vocab_size() == VOCABULARY, "the corpus is too small for the vocabulary"
    return tokenizer


def write_tokenizer(directory: Path) -> TextCodec:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    write_atomic(directory / "tokenizer.json", build_tokenizer().to_str(pretty=True).encode())
    write_atomic(directory / "tokenizer_config.json", json.dumps(settings, indent=2).encode() + b"\n")
    write_atomic(directory / "chat_template.jinja", TEMPLATE.encode())
    return TextCodec.from_directory(directory)


def worked_solution(problem: ChainSum, style: str, slip: float, rng: random.Random) -> str:
    """The text after the opened think tag; a slip is carried on faithfully by the steps that follow it."""
    first = _slipping(problem.first + problem.second, slip, rng)
    second = _slipping(first + problem.third, slip, rng)
    answer = _slipping(second, slip, rng)
    first_step = f"{problem.first}{problem.second:+d}={first}"
    second_step = f"{first}{problem.third:+d}={second}"
    check = f" {second}{-problem.third:+d}={first}" if style == "checked" else ""
    return f"{first_step} {second_step}{check}{THINK_CLOSE}{answer}"


def _slipping(value: int, slip: float, rng: random.Random) -> int:
    """The value or, with the given probability, one with a wrong digit: noise that says nothing about arithmetic."""
    if rng.random() >= slip:
        return value
    digits = list(str(value))
    place = rng.randrange(len(digits))
    lowest = "1" if place == 0 and len(digits) > 1 else "0"
    digits[place] = rng.choice([digit for digit in "0123456789" if digit >= lowest and digit != digits[place]])
    return int("".join(digits))


def draw_target(rng: random.Random) -> int:
    """A length to ask for, or 0 for none."""
    return 0 if rng.random() < 0.1 else rng.randint(16, 35)


def style_for(target: int) -> str:
    """The style whose usual length is nearest to the target."""
    return min(STYLE_LENGTHS, key=lambda style: abs(STYLE_LENGTHS[style] - target)) if target else "plain"


def draw_example(codec: TextCodec, rng: random.Random, *, slip: float, heed: float) -> tuple[list[int], list[int]]:
    """Prompt and solution tokens of a problem that is not held out."""
    problem = draw_chain_sum(rng)
    while problem.is_heldout:
        problem = draw_chain_sum(rng)
    target = draw_target(rng)
    style = style_for(target) if rng.random() < heed else rng.choice(list(STYLE_LENGTHS))
    prompt = codec.prompt_tokens(as_task(problem), target, system_prompt="", length_instruction=INSTRUCTION)
    return prompt, codec.encode(worked_solution(problem, style, slip, rng) + END)


def collate(examples: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels [batch, length], padded on the right; only solutions are labelled."""
    length = max(len(prompt) + len(solution) for prompt, solution in examples)
    ids_BL = torch.zeros(len(examples), length, dtype=torch.int64)
    labels_BL = torch.full_like(ids_BL, -100)
    for row, (prompt, solution) in enumerate(examples):
        end = len(prompt) + len(solution)
        ids_BL[row, :end] = torch.tensor(prompt + solution)
        labels_BL[row, len(prompt) : end] = torch.tensor(solution)
    return ids_BL, labels_BL


def batches(recipe: Recipe, codec: TextCodec) -> Iterator[tuple[Tensor, Tensor]]:
    """Clean solutions first: learnt from careless ones alone, the arithmetic takes several times as long."""
    rng = random.Random(recipe.seed)
    for step in range(recipe.clean_steps + recipe.careless_steps):
        clean = step < recipe.clean_steps
        slip, heed = (0.0, 1.0) if clean else (recipe.slip, recipe.heed)
        yield collate([draw_example(codec, rng, slip=slip, heed=heed) for _ in range(recipe.batch)])


def build_model(recipe: Recipe, codec: TextCodec) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=codec.vocab_size,
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        intermediate_size=recipe.intermediate,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=codec.eos_token_ids[0],
        pad_token_id=codec.encode(PAD)[0],
    )
    return LlamaForCausalLM(config)


def train(recipe: Recipe, codec: TextCodec, model: LlamaForCausalLM) -> None:
    total = recipe.clean_steps + recipe.careless_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    for step, (ids_BL, labels_BL) in enumerate(batches(recipe, codec)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, total)
        loss = model(input_ids=ids_BL, labels=labels_BL).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == total - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


def _schedule(step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = min(1.0, (step + 1) / 100)
    return warmup * (0.05 + 0.475 * (1 + math.cos(math.pi * step / total)))


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: Sequence[list[int]], seed: int, *, greedy: bool = False
) -> list[list[int]]:
    """One completion per prompt at temperature 1, end token included."""
    pad, end = model.config.pad_token_id, model.config.eos_token_id
    width = max(map(len, prompts))
    ids_BL = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out_BL = model.generate(
            input_ids=ids_BL,
            attention_mask=(ids_BL != pad).long(),
            do_sample=not greedy,
            temperature=1.0,
            top_k=0,
            max_new_tokens=MAX_NEW_TOKENS,
        )
    rows = out_BL[:, width:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def evaluate(
    model: LlamaForCausalLM, codec: TextCodec, tasks: TaskSet, targets: Sequence[int], *, greedy: bool = False
) -> tuple[float, float]:
    """Share of right answers and mean length over the tasks, targets taken in turn."""
    chosen = list(zip(tasks, itertools.cycle(targets), strict=False))
    prompts = [codec.prompt_tokens(task, t, system_prompt="", length_instruction=INSTRUCTION) for task, t in chosen]
    starts = range(0, len(prompts), EVALUATION_BATCH)
    parts = [sample(model, prompts[i : i + EVALUATION_BATCH], seed=i, greedy=greedy) for i in starts]
    completions = [completion for part in parts for completion in part]
    rewards = [score(task, codec.decode(tokens)).reward for (task, _), tokens in zip(chosen, completions, strict=True)]
    return sum(rewards) / len(rewards), sum(map(len, completions)) / len(completions)


def build(recipe: Recipe, out: Path) -> None:
    """Writes every file of the policy: tokenizer, chat template, config and bf16 weights."""
    codec = write_tokenizer(out)
    model = build_model(recipe, codec)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters")
    train(recipe, codec, model)
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)


def report(directory: Path) -> None:
    """Held-out accuracy of the saved bf16 weights, computed in fp32."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    codec = TextCodec.from_directory(directory)
    heldout = load_tasks(TasksConfig(count=1, heldout=1024)).heldout
    for targets in ([0], *([length] for length in STYLE_LENGTHS.values()), list(STYLE_LENGTHS.values())):
        accuracy, length = evaluate(model, codec, heldout, targets)
        best, _ = evaluate(model, codec, heldout, targets, greedy=True)
        print(
            f"targets {targets}: {accuracy:.3f} right at temperature 1, {best:.3f} greedy, {length:.1f} tokens",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DIRECTORY)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    torch.set_num_threads(arguments.pop("threads"))
    build(Recipe(**arguments), out)
    report(out)


if __name__ == "__main__":
    main()
