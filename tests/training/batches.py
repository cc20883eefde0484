"""Random batches for the tiny policy."""

import random

from shoal.training import Group, Sample

VOCABULARY = 32


def make_groups(
    seed: int, groups: int = 4, group_size: int = 4, *, policy_version: int = 0, behaviour: bool = False
) -> list[Group]:
    draw = random.Random(seed)
    made = []
    for number in range(groups):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(2, 6))]
        samples = []
        for place in range(group_size):
            output = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
            logprobs = [-draw.random() * 3 for _ in output] if behaviour else None
            reward = float((place + number) % 2)
            samples.append(Sample(prompt, output, reward, reward, logprobs, policy_version))
        made.append(Group(f"0/0/{number}", samples))
    return made
