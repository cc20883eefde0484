"""Makes the policy of the tools demo from the bundled one: `python -m shoal.curation.tool_recipe` (`make demo-tools` does).

First many solutions that ask a calculator, so that the policy learns to copy a problem into a call and a result out of it; then
careless ones among which a few ask: it knows how to use the tool, seldom does, and is mostly wrong without. The rest is left to
reinforcement learning. Held-out problems never enter the data.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.curation.fitting import FitReport, FitSettings
from shoal.curation.recipe import FILES, worked_solution
from shoal.curation.sft import Example, WarmStart, write_policy
from shoal.files import CONFIG_FILE, write_atomic
from shoal.policy import bundled_directory
from shoal.tasks import THINK_CLOSE, PromptStyle, TextCodec
from shoal.tasks.bridge import Bridge, build_bridge
from shoal.tasks.datasets.chain_sums import ChainSum, as_task, sample_chain_sum
from shoal.tasks.environments.registry import refer

OUT = Path("build/demo-tools/policy")


@dataclass(frozen=True)
class ToolRecipe:
    learning_steps: int = 400
    """In which most solutions ask the calculator."""
    learning_share: float = 0.8
    steps: int = 120
    """In which few do."""
    batch: int = 32
    learning_rate: float = 1e-3
    tool_share: float = 0.15
    """Of the solutions that ask the calculator, in the end."""
    slip: float = 0.45
    seed: int = 0


def tool_call(problem: ChainSum) -> str:
    call = {"name": "calculate", "arguments": {"expression": problem.expression}}
    return f"{THINK_CLOSE}<tool_call>{json.dumps(call)}</tool_call>"


def with_tool(problem: ChainSum, codec: TextCodec, bridge: Bridge) -> Example:
    """An episode of two turns: the call, and the answer that the tool gave."""
    end = codec.eos_token_ids[0]
    asked = [*codec.encode(tool_call(problem)), end]
    given = bridge.given(str(problem.answer))
    answered = [*codec.encode(f"{THINK_CLOSE}{problem.answer}"), end]
    lengths = len(asked), len(given), len(answered)
    return Example(_prompt(problem, codec), (*asked, *given, *answered), lengths)


def without_tool(problem: ChainSum, codec: TextCodec, slip: float, rng: random.Random) -> Example:
    text = worked_solution(problem, "plain", slip, rng)
    return Example(_prompt(problem, codec), (*codec.encode(text), codec.eos_token_ids[0]))


def _prompt(problem: ChainSum, codec: TextCodec) -> tuple[int, ...]:
    return tuple(codec.prompt_tokens(as_task(problem), 0, PromptStyle()))


def examples(recipe: ToolRecipe, codec: TextCodec) -> Iterator[Example]:
    rng, bridge = random.Random(recipe.seed), build_bridge(codec, PromptStyle(), refer("calculator"))
    count = 0
    while count < (recipe.learning_steps + recipe.steps) * recipe.batch:
        problem = sample_chain_sum(rng)
        if problem.is_heldout:
            continue
        is_learning = count < recipe.learning_steps * recipe.batch
        count += 1
        if rng.random() < (recipe.learning_share if is_learning else recipe.tool_share):
            yield with_tool(problem, codec, bridge)
        else:
            yield without_tool(problem, codec, recipe.slip, rng)


def build(recipe: ToolRecipe, out: Path) -> None:
    """Writes a whole model directory; its config is that of the bundled policy, whose calibration holds for it."""
    base, work_dir = bundled_directory(), out.with_name(f"{out.name}-work")
    codec = TextCodec.from_directory(base)
    chosen = list(examples(recipe, codec))
    settings = FitSettings(
        batch=recipe.batch,
        learning_rate=recipe.learning_rate,
        warmup_steps=20,
        checkpoint_every=100,
        shuffle=False,
        seed=recipe.seed,
    )
    checkpoint = WarmStart(settings, base, work_dir=work_dir).train(chosen, _report_step)
    shutil.rmtree(work_dir / "policy", ignore_errors=True)
    policy = write_policy(checkpoint, base, work_dir / "policy", base_model="bundled", loss_curve=())
    for name in FILES:
        source = base if name == CONFIG_FILE else policy
        if (source / name).is_file():
            write_atomic(out / name, (source / name).read_bytes())


def _report_step(report: FitReport) -> None:
    if report.step % 50 == 0 or report.step == report.steps:
        print(f"step {report.step:5d}  loss {report.loss:.4f}  {report.seconds:6.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if (arguments.out / CONFIG_FILE).is_file():
        print(f"{arguments.out} is there already")
        return
    torch.set_num_threads(arguments.threads)
    build(ToolRecipe(), arguments.out)


if __name__ == "__main__":
    main()
