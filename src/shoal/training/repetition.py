"""A self-test at start: does this machine repeat a step bit for bit?

The gradient of a made-up batch is computed twice, on the real policy with the real kernels; nothing is trained. Where it differs, a
trainer that dies between publishing a version and writing its checkpoint cannot come back to that version: the run is then rewound.
"""

import random

from shoal.training.packing.samples import Group, Sample
from shoal.training.trainer import Trainer

GPU_TOKENS, CPU_TOKENS = 2048, 128
"""Trained tokens of the batch: on a GPU enough that many blocks add to the same weights, on a CPU few enough to take no time."""
GROUP_SIZE = 4


def steps_repeat(trainer: Trainer) -> bool:
    """The same answer on every rank; all of them must ask."""
    groups = made_up_groups(trainer)
    first, second = (trainer.gradient_fingerprint(groups) for _ in range(2))
    return not trainer.world.any(first != second)


def made_up_groups(trainer: Trainer) -> list[Group]:
    """Random tokens in rows of unequal lengths, with unequal rewards. Completions of a group begin alike and two are equal, so that
    gradients of shared positions and predictions are summed, too."""
    draw = random.Random(0)
    vocabulary = int(trainer.policy.model.config.get_text_config().vocab_size)
    tokens = CPU_TOKENS if trainer.world.device.type == "cpu" else GPU_TOKENS
    longest = max(2, min(trainer.longest_row or tokens, tokens // GROUP_SIZE))
    groups: list[Group] = []
    while tokens > 0:
        prompt = [draw.randrange(vocabulary) for _ in range(max(1, longest // 8))]
        output = [draw.randrange(vocabulary) for _ in range(longest // 2 + 1)]
        samples = []
        for place in range(GROUP_SIZE):
            if place > 1:
                length = draw.randint(max(1, longest // 4), longest // 2 + 1)
                output = [*output[: longest // 8], *[draw.randrange(vocabulary) for _ in range(length - longest // 8)]]
            samples.append(Sample(prompt, output, float(place % 2), float(place % 2)))
            tokens -= len(output)
        groups.append(Group(f"self-test/{len(groups)}", samples))
    return groups
