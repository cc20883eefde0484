"""docs/reference/settings.md: every setting of a run file with its default and its reason."""

from shoal.config import describe
from tools.reference.text import item, wrapped

INTRODUCTION = (
    "A run file is TOML with the sections below. Every setting can also be given as `--section.name VALUE`"
    " to any command that takes a run file; the flag wins. `shoal config` prints this page in the terminal."
    " An unknown key or a wrong value is refused with the nearest valid one."
)


def page() -> str:
    lines = ["# Settings", "", wrapped(INTRODUCTION)]
    section = ""
    for key, default, reason in describe():
        current, name = key.split(".")
        if current != section:
            section = current
            lines += ["", f"## [{section}]", ""]
        lines.append(item(f"**`{name}`** = `{default}`. {reason}"))
    return "\n".join(lines) + "\n"
