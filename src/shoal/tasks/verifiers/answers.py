"""Where the answer is in a completion: after the think part, in a box, behind "the answer is", or in a code block.

A completion starts inside the think part that the prompt opened. Everything here is linear in the length of the text: no input
makes it slow.
"""

import re
import textwrap

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
NEVER_CLOSED = "the thinking was never closed"
SEVERAL_ANSWERS = "several boxes hold different answers"
_MARK = re.compile(
    r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?P<bare>[-+]?[0-9]+(?:[.,][0-9]+)*%?|\([^()]{1,200}\)|\\[A-Za-z]+|[A-Za-z](?![A-Za-z])))"
    r"|\\.|[{}]",
    re.DOTALL,
)
_ARGUMENTS = re.compile(r"(?:\s{0,9}\{[^{}]{0,200}\}){0,4}")
MOST_STATEMENTS = 16
LONGEST_NESTED = 4000
_FINAL = re.compile(r"(?:answer\s+is|answer\s*:|####)[ \t:]*", re.IGNORECASE)
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*")


def answer_part(completion_text: str) -> str | None:
    """What follows the closing think tag; None if the thinking was never closed."""
    _, tag, answer = completion_text.partition(THINK_CLOSE)
    return answer if tag else None


def boxed_answers(text: str) -> list[str]:
    """What the outermost complete boxes hold, in order, each text once; \\boxed 5 is a box too."""
    open_braces: list[tuple[int, bool]] = []
    boxes: list[tuple[int, int]] = []
    for match in _MARK.finditer(text):
        if match["bare"]:
            boxes.append((match.start("bare"), _bare_end(text, match)))
        elif match["brace"] or match.group() == "{":
            open_braces.append((match.end(), bool(match["brace"])))
        elif match.group() == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box:
                _drop_inner(boxes, start)
                boxes.append((start, match.start()))
    return list(dict.fromkeys(filter(None, (_unboxed(text[start:end]) for start, end in boxes))))


def _bare_end(text: str, match: re.Match[str]) -> int:
    arguments = _ARGUMENTS.match(text, match.end()) if match["bare"].startswith("\\") else None
    return arguments.end() if arguments else match.end()


def _drop_inner(boxes: list[tuple[int, int]], start: int) -> None:
    while boxes and boxes[-1][0] > start:
        boxes.pop()


def _unboxed(text: str) -> str:
    """Without boxes that hold nothing but a box."""
    text = text.strip()
    if len(text) > LONGEST_NESTED:
        return text
    while (match := _MARK.match(text)) and match["brace"] and text.endswith("}") and text.count("{") == text.count("}"):
        text = text[match.end() : -1].strip()
    return text


def statements(text: str) -> list[str]:
    """What follows each "answer is", "Answer:" or "####" on its line; before another one, only its sentence."""
    parts = [part.split("\n", 1) for part in _FINAL.split(text)[1:][-MOST_STATEMENTS:]]
    lines = [part[0] if len(part) > 1 or part is parts[-1] else part[0].split(". ", 1)[0] for part in parts]
    found = (line.strip().removesuffix(".").strip().strip("*").strip() for line in lines)
    return list(dict.fromkeys(filter(None, found)))


def final_answer(text: str) -> str | None:
    """The boxed answer, or else the last statement. Several boxes that differ are no answer."""
    boxes = boxed_answers(text)
    if boxes:
        return boxes[0] if len(boxes) == 1 else None
    stated = statements(text)
    return stated[-1] if stated else None


def last_code_block(text: str, languages: tuple[str, ...]) -> str | None:
    """The body of the last closed fenced block in one of these languages; "" is a block that names none. Fences may be indented."""
    found: str | None = None
    language: str | None = None
    fence, body = "", [""]
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line.rstrip())
        if match is None or (language is not None and not match[1].startswith(fence)):
            body.append(line)
        elif language is None or match[2]:
            # A fence that names a language opens a block, even where the one before was never closed.
            fence, language, body = match[1], match[2].strip("{}.").lower(), []
        else:
            found = _dedented(body) if language in languages else found
            language = None
    return found


def _dedented(lines: list[str]) -> str:
    first = next((line for line in lines if line.strip()), "")
    return textwrap.dedent("\n".join(lines)) if first[:1].isspace() else "\n".join(lines)
