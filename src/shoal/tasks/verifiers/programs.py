"""Code tasks: the last Python block of the answer has to pass every test, in the sandbox.

Tests are calls of a function or pairs of standard input and output. Only inputs enter the sandbox; what comes out is bytes, which
are compared here with the expected ones, so nothing a program does inside can touch the comparison. Tolerant: programs may depend
on time, memory and chance.
"""

import json
import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from shoal.tasks.sandbox.pool import shared_pool
from shoal.tasks.sandbox.sandbox import LIMITS, NOT_JSON, OUT_OF_MEMORY, Job, Ran
from shoal.tasks.verifiers.answers import NEVER_CLOSED, answer_part, last_code_block
from shoal.tasks.verifiers.text import Info, Outcome, shown

LONGEST_PROGRAM = 200_000
MOST_TESTS = 1000
FLOAT_TOLERANCE = 1e-6
WAITING_DISCOUNT = 3.0
"""A busy machine may run a program this many times slower before its waiting counts."""
LANGUAGES = ("python", "py", "python3")


class CodeTest(BaseModel):
    kind: Literal["function_call", "stdin_stdout"]
    input: Any
    output: Any
    function: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> "CodeTest":
        if self.kind == "function_call":
            if not self.function or not self.function.isidentifier():
                raise ValueError("a function call needs fn_name, the name of a function")
            if not isinstance(self.input, list):
                raise ValueError("the input of a function call is a list of arguments")
        elif not isinstance(self.input, str) or not isinstance(self.output, str):
            raise ValueError("standard input and output are texts")
        return self


def _tests(value: object) -> object:
    """Both public layouts: columns of inputs and outputs, or one object per test; either may be the text of JSON."""
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, dict):
        inputs, outputs, name = value.get("inputs"), value.get("outputs"), value.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are lists of the same length")
        return [_test(given, expected, name) for given, expected in zip(inputs, outputs, strict=True)]
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return [_test(entry.get("input"), entry.get("output"), _name(entry)) for entry in value]
    raise ValueError("test_cases is neither an object with inputs and outputs nor a list of objects")


def _name(entry: dict[str, Any]) -> str | None:
    if entry.get("type") == "function_call" and not entry.get("fn_name"):
        raise ValueError("a function call needs fn_name, the name of a function")
    return entry.get("fn_name") if entry.get("type") != "stdin_stdout" else None


def _test(given: Any, expected: Any, name: str | None) -> dict[str, Any]:
    if name is None:
        return {"kind": "stdin_stdout", "input": _lines(given), "output": _lines(expected)}
    if isinstance(given, str):  # one JSON value per line, as in LiveCodeBench
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        expected = json.loads(expected) if isinstance(expected, str) else expected
    return {"kind": "function_call", "input": given, "output": expected, "function": name}


def _lines(value: Any) -> Any:
    return "\n".join(map(str, value)) if isinstance(value, list) else value


class CodeInfo(Info):
    language: Literal["python", "python3"] = "python"
    packages: tuple[Literal["numpy"], ...] = ()
    """What programs may import beside the standard library."""
    test_cases: Annotated[list[CodeTest], BeforeValidator(_tests), Field(min_length=1, max_length=MOST_TESTS)]

    @model_validator(mode="after")
    def _one_kind(self) -> "CodeInfo":
        if len({(test.kind, test.function) for test in self.test_cases}) > 1:
            raise ValueError("all tests of a task call the same function or read standard input")
        return self


def check_code(info: CodeInfo, text: str) -> Outcome:
    answer = answer_part(text)
    if answer is None:
        return Outcome(0.0, NEVER_CLOSED)
    answer = answer.replace("\ufeff", "")
    program = last_code_block(answer, LANGUAGES) or last_code_block(answer, ("",))
    if program is None:
        return Outcome(0.0, "the answer has no closed python block")
    if len(program) > LONGEST_PROGRAM:
        return Outcome(0.0, f"the program is longer than {LONGEST_PROGRAM} letters")
    return run_tests(program, info.test_cases, info.packages)


def run_tests(program: str, tests: Sequence[CodeTest], packages: tuple[str, ...] = ()) -> Outcome:
    """1 if every test passes; ends at the first that does not. A second of waiting costs a third of a second of computing."""
    started = time.monotonic()
    outcome, cpu_s = _run(program, tests, packages)
    return outcome._replace(cost_s=max(cpu_s, (time.monotonic() - started) / WAITING_DISCOUNT))


def _run(program: str, tests: Sequence[CodeTest], packages: tuple[str, ...]) -> tuple[Outcome, float]:
    job = Job(program, [test.input for test in tests], tests[0].function, packages)
    passed, cpu_s = 0, 0.0
    with shared_pool(packages).sandbox() as sandbox:
        for test, run in zip(tests, sandbox.run(job), strict=False):
            complaint, cpu_s = _complaint(test, run), cpu_s + run.cpu_s
            if complaint:
                return Outcome(0.0, f"test {passed + 1} of {len(tests)}: {complaint}", limited=run.limited), cpu_s
            passed += 1
    if passed < len(tests):
        return Outcome(0.0, f"only {passed} of {len(tests)} tests came to an end", limited=True), cpu_s
    return Outcome(1.0, f"all {len(tests)} tests passed"), cpu_s


def _complaint(test: CodeTest, run: Ran) -> str:
    """Why this run does not pass; empty if it does."""
    if run.ending:
        return ENDINGS.get(run.ending, f"ended by {run.ending}")
    if run.exit_code == OUT_OF_MEMORY:
        return f"out of memory ({LIMITS.memory_bytes >> 20} MiB)"
    if test.kind == "stdin_stdout":
        return _compare_output(run, test.output)
    if run.exit_code == NOT_JSON:
        return "returned a value that is not JSON"
    if run.exit_code:
        return f"raised {shown(run.produced.decode(errors='replace'))}"
    return _compare_value(run.produced, test.output)


ENDINGS = {
    "cpu": f"took more than {LIMITS.cpu_s} s",
    "wall": "did not end in time",
    "output": f"wrote more than {LIMITS.output_bytes >> 20} MiB",
}


def _compare_output(run: Ran, expected: str) -> str:
    if run.exit_code:
        return "ended with an error"
    found = run.produced.decode(errors="replace")
    if same_output(found, expected):
        return ""
    return f"wrote {shown(found.strip())}, expected {shown(expected.strip())}"


def _compare_value(produced: bytes, expected: Any) -> str:
    try:
        found = json.loads(produced)
    except (ValueError, RecursionError):
        return "returned nothing"
    wrapped = isinstance(expected, list) and len(expected) == 1  # APPS wraps each expected value in a list
    if same_value(found, expected) or (wrapped and same_value(found, expected[0])):
        return ""
    return f"returned {shown(found)}, expected {shown(expected)}"


def same_output(found: str, expected: str) -> bool:
    """Equal up to white space; numbers written with a point up to a millionth."""
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(
        word == want or _close_words(word, want) for word, want in zip(words, wanted, strict=True)
    )


def _close_words(word: str, want: str) -> bool:
    if "." not in want:
        return False
    try:
        return _close(float(word), float(want))
    except ValueError:
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Equal as JSON, true and 1 apart; floats up to a millionth."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, float) or isinstance(expected, float):
        return isinstance(found, int | float) and isinstance(expected, int | float) and _close(found, expected)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in found)
    return bool(found == expected)


def _close(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except OverflowError:
        return False
