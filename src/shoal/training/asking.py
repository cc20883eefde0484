"""One rank asks the coordinator for all: the same answer, or the same refusal, holds on every rank. Files, which may be large, are
fetched by one rank of each node for the others on it.

Ranks that asked for themselves could hear different things around a change of the run, and would then wait for each other in
different collectives.
"""

import json
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel

from shoal.errors import RefusedError, ShoalError
from shoal.training.model.distributed import World

FETCHED, REFUSED = b"+", b"-"
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


def fetch_for_node(world: World, fetch: Callable[[], bytes]) -> bytes:
    """The bytes that the first rank of this node fetched; its error is raised on every rank of the node."""
    if world.node is None:
        return fetch()
    if not world.leads_node:
        kind, data = _opened(world.share_on_node(b""))
        if kind == REFUSED:
            raise RefusedError(**json.loads(data))
        return data
    try:
        data = fetch()
    except ShoalError as error:
        world.share_on_node(REFUSED + json.dumps(_facts(error)).encode())
        raise
    world.share_on_node(FETCHED + data)
    return data


def _opened(message: bytes) -> tuple[bytes, bytes]:
    return message[:1], message[1:]


def _facts(error: ShoalError) -> dict[str, object]:
    return {"code": error.code, "message": error.message, "hint": error.hint, "permanent": error.permanent}


def _taken(text: str) -> str:
    said = json.loads(text)
    if "refusal" in said:
        raise RefusedError(**said["refusal"])
    return str(said["answer"])
