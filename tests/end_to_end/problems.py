"""Problems whose answers are programs and formulas, and a policy that has just learnt to answer them, half of the time rightly."""

import subprocess
import sys
from pathlib import Path

from shoal.curation import Demonstration, write_demonstration
from shoal.tasks import Task

STEPS = range(2, 8)


def code_task(step: int) -> Task:
    tests = {"inputs": [[1], [10]], "outputs": [1 + step, 10 + step], "fn_name": "f"}
    return Task(
        problem_id=f"code/{step}",
        source="hand",
        task_type="verifiable_code",
        prompt=f"Code f(x) as x+{step}.",
        verification_info={"language": "python", "test_cases": tests},
    )


def math_task(step: int) -> Task:
    return Task(
        problem_id=f"math/{step}",
        source="hand",
        task_type="verifiable_math",
        prompt=f"Half of {step} as a fraction.",
        verification_info={"ground_truth": str(step / 2)},
    )


def program(step: int, sign: str) -> str:
    return f"</think>```python\nf=lambda x:x{sign}{step}\n```"


def fraction(step: int, denominator: int) -> str:
    return f"</think>\\boxed{{\\frac{{{step}}}{{{denominator}}}}}"


def demonstrations() -> list[Demonstration]:
    """Of each problem a right and a wrong solution."""
    code = [Demonstration(code_task(step), program(step, sign)) for step in STEPS for sign in "+-"]
    return code + [Demonstration(math_task(step), fraction(step, below)) for step in STEPS for below in (2, 3)]


def write_problems(path: Path) -> Path:
    path.write_text("".join(f"{make(step).model_dump_json()}\n" for step in STEPS for make in (code_task, math_task)))
    return path


def taught_policy(root: Path) -> Path:
    """The bundled policy after a warm start on the demonstrations."""
    file, policy = root / "demonstrations.jsonl", root / "policy"
    file.write_text("".join(f"{write_demonstration(one)}\n" for one in demonstrations()))
    settings = ["--no-filters", "--epochs", "120", "--batch", "24", "--learning-rate", "2e-3", "--warmup-steps", "5"]
    command = [sys.executable, "-m", "shoal", "sft", str(file), str(policy), "--threads", "1", *settings]
    subprocess.run(command, check=True, timeout=600)
    return policy
