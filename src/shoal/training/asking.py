"""One rank asks the coordinator for all: the same answer, or the same refusal, holds on every rank.

Ranks that asked for themselves could hear different things around a change of the run, and would then wait for each other in
different collectives.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from shoal.errors import RefusedError, ShoalError
from shoal.training.model.distributed import World

AnswerT = TypeVar("AnswerT", bound=BaseModel)


def ask_as_one(world: World, answer: type[AnswerT], ask: Callable[[], AnswerT]) -> AnswerT:
    """What the main rank was answered; its error is raised on every rank."""
    return answer.model_validate_json(act_as_one(world, lambda: ask().model_dump_json()))


def act_as_one(world: World, act: Callable[[], str]) -> str:
    """What the main rank's action returned; its error is raised on every rank."""
    if world.size == 1:
        return act()
    if not world.is_main:
        return _taken(world.share(""))
    try:
        text = act()
    except ShoalError as error:
        world.share(json.dumps({"refusal": _facts(error)}))
        raise
    world.share(json.dumps({"answer": text}))
    return text


def _facts(error: ShoalError) -> dict[str, object]:
    return {"code": error.code, "message": error.message, "hint": error.hint, "permanent": error.permanent}


def _taken(text: str) -> str:
    said = json.loads(text)
    if "refusal" in said:
        raise RefusedError(**said["refusal"])
    return str(said["answer"])
