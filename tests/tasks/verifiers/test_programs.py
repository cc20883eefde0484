"""Code tasks end to end: extraction, sandbox, comparison out here."""

import re
from typing import Any

import pytest

from shoal.tasks import Score, Task, score
from shoal.tasks.sandbox.sandbox import sandbox_complaint
from shoal.tasks.verifiers.programs import CodeInfo, same_output, same_value
from shoal.tasks.verifiers.registry import find_verifier

needs_sandbox = pytest.mark.skipif(bool(sandbox_complaint()), reason=f"{sandbox_complaint()}: run `make system`")
DOUBLE = {"test_cases": {"inputs": [[2], [5]], "outputs": [4, 10], "fn_name": "double"}}
SQUARE = {"test_cases": [{"type": "stdin_stdout", "input": f"{n}\n", "output": f"{n * n}\n"} for n in (3, 4)]}


def scored(info: dict[str, Any], program: str, *, block: str = "python") -> Score:
    task = Task(problem_id="p", source="t", task_type="verifiable_code", prompt="?", verification_info=info)
    return score(task, f"hm</think>Like this:\n```{block}\n{program}\n```\nDone.")


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "def double(x):\n    return 2 * x",
        "class Solution:\n    def double(self, x):\n        return x + x",
        "import sys\ndef double(x):\n    print('noise')\n    return 2 * x",
    ],
)
def test_a_function_that_passes_every_call_earns_one(program: str) -> None:
    result = scored(DOUBLE, program)
    assert (result.reward, result.why, result.exact) == (1.0, "all 2 tests passed", False)
    assert result.cost_s > 0.0


@needs_sandbox
@pytest.mark.parametrize("program", ["print(int(input()) ** 2)", "x = int(input())\nprint(x * x)\nexit()"])
def test_a_script_that_writes_every_output_earns_one(program: str) -> None:
    assert scored(SQUARE, program).reward == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("def double(x):\n    return 4", "test 2 of 2: returned 4, expected 10"),
        ("def double(x):\n    raise ValueError('no')", "raised ValueError: no"),
        ("def triple(x): pass", "raised KeyError"),
        ("def double(x)", "raised SyntaxError"),
        ("import os; os._exit(0)", "returned nothing"),
        ("import sys; sys.exit(0)", "returned nothing"),
        ("def double(x): return {1, 2}", "not JSON"),
        ("class Yes(int):\n    def __eq__(s, o): return True\ndef double(x): return Yes(0)", "returned 0"),
        ("class Yes:\n    def __eq__(s, o): return True\ndef double(x): return Yes()", "not JSON"),
        ("import builtins, json\njson.dumps = lambda v: 'true'\ndef double(x): return 1", "returned true"),
        ("import os\nos.write(3, b'4')\ndef double(x): return 4", "returned 44"),
    ],
)
def test_every_other_function_earns_nothing_and_says_why(program: str, why: str) -> None:
    result = scored(DOUBLE, program)
    assert result.reward == 0.0
    assert why in result.why
    assert not result.limited


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "why"),
    [
        # On a busy machine the clock may decide before the processor time does.
        ("def double(x):\n    while True: pass", "took more than|did not end in time"),
        ("def double(x): return 'a' * 10**9", "out of memory"),
    ],
)
def test_a_limit_ends_in_nothing_and_is_reported_as_such(program: str, why: str) -> None:
    result = scored(DOUBLE, program)
    assert result.reward == 0.0
    assert re.search(why, result.why)
    assert result.limited


HONEST = {
    "forgotten types": "```python\nclass Solution:\n    def square(self, x: int) -> List[Optional[int]]:\n        return x\n"
    "print(int(input()) ** 2)\n```",
    "indented fence": "1. Like this:\n   ```python\n   x = int(input())\n   if x:\n       print(x * x)\n   ```",
    "indented body": "```python\n    x = int(input())\n    print(x * x)\n```",
    "unlabelled fence": "```\nprint(int(input()) ** 2)\n```",
    "tildes": "~~~python\nprint(int(input()) ** 2)\n~~~",
    "longer fence": "````python\nprint(int(input()) ** 2)\n```\n````".replace("\n```\n", "\n#```\n"),
    "capital label": "```Python3\nprint(int(input()) ** 2)\n```",
    "braced label": "```{.python}\nprint(int(input()) ** 2)\n```",
    "byte-order mark": "\ufeff```python\n\ufeffprint(int(input()) ** 2)\n```",
    "output of another kind after it": "```python\nprint(int(input()) ** 2)\n```\nIt prints:\n```\n9\n```",
    "a block that was never closed before it": "```python\nx = \n```python\nprint(int(input()) ** 2)\n```",
    "output at exit": "```python\nimport atexit\nx = int(input())\natexit.register(print, x * x)\n```",
    "output at exit after sys.exit": "```python\nimport atexit, sys\natexit.register(print, int(input()) ** 2)\nsys.exit()\n```",
    "output of a thread": "```python\nimport threading\ndef main():\n    print(int(input()) ** 2)\n"
    "threading.stack_size(1 << 26)\nthreading.Thread(target=main).start()\n```",
    "binary streams": "```python\nimport sys\nx = int(sys.stdin.buffer.read())\nsys.stdout.buffer.write(b'%d' % (x * x))\n```",
    "original streams": "```python\nimport sys\nx = int(sys.__stdin__.read())\nsys.__stdout__.write(str(x * x))\n```",
    "windows lines": "```python\r\nx = int(input())\r\nprint(x * x)\r\n```\r\n",
}


@needs_sandbox
@pytest.mark.parametrize("habit", HONEST)
def test_an_honest_program_earns_one_whatever_its_habits(habit: str) -> None:
    task = Task(problem_id="p", source="t", task_type="verifiable_code", prompt="?", verification_info=SQUARE)
    assert score(task, f"hm</think>{HONEST[habit]}").why == "all 2 tests passed"


NUMPY = "import numpy as np\ndef double(x):\n    return np.dot(np.array([x]), [2])"


@needs_sandbox
def test_numpy_is_there_where_the_task_allows_it() -> None:
    assert scored(DOUBLE | {"packages": ["numpy"]}, NUMPY).why == "all 2 tests passed"
    for program in (NUMPY, f"import sys\nsys.path.append('/packages')\n{NUMPY}"):
        assert "No module named 'numpy'" in scored(DOUBLE, program).why
    assert "packages" in find_verifier("verifiable_code").complaint(DOUBLE | {"packages": ["torch"]})


@needs_sandbox
def test_arrays_are_returned_as_lists_and_other_objects_are_not() -> None:
    info = {"test_cases": {"inputs": [[2]], "outputs": [[0, 1]], "fn_name": "count"}, "packages": ["numpy"]}
    assert scored(info, "import numpy\ndef count(x): return numpy.arange(x)").reward == 1.0
    fake = "class Fake:\n    __module__ = 'nampy'\n    def tolist(self): return [0, 1]\ndef count(x): return Fake()"
    assert "not JSON" in scored(info, fake).why


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "import atexit\natexit.register(print, int(input()) ** 2)\n1 / 0",
        "import threading\nthreading.Thread(target=lambda: 1 / 0).start()\nint(input())",
        "import atexit, os\natexit.register(os._exit, 1)\nprint(int(input()) ** 2)",
    ],
)
def test_a_program_that_fails_at_its_end_earns_nothing(program: str) -> None:
    assert scored(SQUARE, program).reward == 0.0


@needs_sandbox
def test_an_output_that_never_comes_fails_the_test() -> None:
    assert "wrote 9, expected 16" in scored(SQUARE, "print(9)").why
    assert "ended with an error" in scored(SQUARE, "print(int(input()) ** 2); 1 / 0").why


def test_only_a_closed_python_block_after_the_thinking_counts() -> None:
    assert scored(DOUBLE, "def double(x): return 2 * x", block="text").why == "the answer has no closed python block"
    task = Task(problem_id="p", source="t", task_type="verifiable_code", prompt="?", verification_info=DOUBLE)
    assert "never closed" in score(task, "```python\ndef double(x): return 2 * x\n```").why
    assert "no closed" in score(task, "</think>```python\ndef double(x): return 2 * x").why


def test_calls_may_be_written_as_lines_of_json() -> None:
    info = CodeInfo.model_validate(
        {"test_cases": {"inputs": ['[1, 2]\n"a"'], "outputs": ["[3]"], "fn_name": "f"}},
    )
    assert (info.test_cases[0].input, info.test_cases[0].output) == ([[1, 2], "a"], [3])


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({}, "test_cases"),
        ({"test_cases": []}, "at least 1"),
        ({"test_cases": {"inputs": ["1"], "outputs": []}}, "same length"),
        ({"test_cases": "{"}, "test_cases"),
        ({"test_cases": [{"type": "function_call", "input": [1], "output": 1}]}, "fn_name"),
        ({"test_cases": {"inputs": [[1]], "outputs": [1], "fn_name": "a b"}}, "fn_name"),
        ({"test_cases": {"inputs": [1], "outputs": ["1"]}}, "texts"),
        ({"test_cases": [{"type": "stdin_stdout", "input": "1"}]}, "texts"),
        ({"language": "cobol", "test_cases": {"inputs": ["1"], "outputs": ["1"]}}, "language"),
    ],
)
def test_malformed_tests_are_refused_when_the_task_is_loaded(info: dict[str, Any], complaint: str) -> None:
    assert complaint in find_verifier("prime_rl_code").complaint(info)


def test_comparison_forgives_white_space_and_rounding_and_nothing_else() -> None:
    assert same_output("1  2\n\n3", "1 2\n3\n")
    assert same_output("0.3333333", "0.33333333")
    assert not same_output("1", "1 1")
    assert not same_output("7", "8")
    assert same_value([1, {"a": 0.1 + 0.2}], [1, {"a": 0.3}])
    assert not same_value(True, 1)
    assert not same_value("1", 1)
    assert not same_value([1], [1, 2])
