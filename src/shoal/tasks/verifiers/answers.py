"""Where the answer is in a completion: after the think part, in a box, behind "the answer is", or in a code block.

A completion starts inside the think part that the prompt opened. Everything here is linear in the length of the text: no input
makes it slow.
"""

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
NEVER_CLOSED = "the thinking was never closed"
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FINAL = re.compile(r"(?:answer\s+is|answer\s*:|####)[ \t:]*", re.IGNORECASE)
_FENCE = "```"


def answer_part(completion_text: str) -> str | None:
    """What follows the closing think tag; None if the thinking was never closed."""
    _, tag, answer = completion_text.partition(THINK_CLOSE)
    return answer if tag else None


def last_boxed(text: str) -> str | None:
    """What the last complete \\boxed{…} holds, braces matched."""
    open_braces: list[tuple[int, bool]] = []
    found: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        mark = match.group()
        if mark == "}":
            start, is_box = open_braces.pop() if open_braces else (0, False)
            if is_box and (found is None or start > found[0]):
                found = (start, match.start())
        elif mark == "{" or len(mark) > 2:
            open_braces.append((match.end(), mark != "{"))
    return text[slice(*found)].strip() if found else None


def final_answer(text: str) -> str | None:
    """The last boxed answer, or else what follows the last "answer is", "Answer:" or "####" on its line."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    found = list(_FINAL.finditer(text))
    if not found:
        return None
    line = text[found[-1].end() :].split("\n", 1)[0].strip()
    return line.removesuffix(".").strip().strip("*").strip() or None


def last_code_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The body of the last closed fenced block in one of these languages; "" is a block that names none."""
    found: str | None = None
    language: str | None = None
    body: list[str] = []
    for line in text.split("\n"):
        fence = line.strip()
        if not fence.startswith(_FENCE):
            body.append(line)
        elif language is None:
            language, body = fence.removeprefix(_FENCE).strip().lower(), []
        else:
            if language in languages:
                found = "\n".join(body)
            language = None
    return found
