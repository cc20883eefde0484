import itertools

from shoal.curation.tool_recipe import ToolRecipe, examples
from shoal.policy import bundled_directory
from shoal.protocol.segments import split_segments
from shoal.tasks import TextCodec
from shoal.tasks.environments.tools import parse_tool_calls

CODEC = TextCodec.from_directory(bundled_directory())


def test_some_solutions_ask_the_calculator_and_learn_only_what_they_say() -> None:
    made = list(itertools.islice(examples(ToolRecipe(learning_share=0.3), CODEC), 60))
    asking = [example for example in made if example.segment_lengths]
    assert 5 < len(asking) < 40
    for example in asking:
        call, given, answer = (
            CODEC.decode_all(part) for part in split_segments(example.completion, example.segment_lengths)
        )
        (found,) = parse_tool_calls(call)
        expression = found.arguments["expression"]
        assert CODEC.decode_all(example.prompt).startswith(f"<|user|>Compute {expression}.")
        value = sum(int(term) for term in expression.replace("-", "+-").split("+"))
        assert given == f"<|tool|>{value}<|end|><|assistant|><think>"
        assert answer == f"</think>{value}<|end|>"


def test_the_same_recipe_gives_the_same_examples() -> None:
    first, second = (list(itertools.islice(examples(ToolRecipe(), CODEC), 20)) for _ in range(2))
    assert first == second


def test_in_the_end_few_solutions_ask() -> None:
    made = list(examples(ToolRecipe(learning_steps=4, steps=4, batch=50), CODEC))
    shares = [sum(bool(example.segment_lengths) for example in part) / 200 for part in (made[:200], made[200:])]
    assert shares[0] > 0.6
    assert 0.03 < shares[1] < 0.25
