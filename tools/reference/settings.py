"""docs/reference/settings.md: every setting of a run file with its default and its reason."""

from shoal.config import all_settings
from tools.reference.text import item, wrapped

INTRODUCTION = (
    "A run file is TOML with the sections below. Every setting can also be given as `--section.name VALUE`"
    " to any command that takes a run file; the flag wins. `shoal config` prints this page in the terminal."
    " An unknown key or a wrong value is refused with the nearest valid one."
)
CHANGES = (
    "Settings marked **fixed** belong to what workers and validators build on: a run keeps them from its first start to"
    " its last, and another value is refused. All others may change between two starts: stop the role that uses them,"
    " change the run file or give the flag, and start it again. The command that starts it prints what has changed."
)


def page() -> str:
    lines = ["# Settings", "", wrapped(INTRODUCTION), "", wrapped(CHANGES)]
    section = ""
    for setting in all_settings():
        current, _, name = setting.key.rpartition(".")
        if current != section:
            section = current
            lines += ["", f"## [{section}]", ""]
        fixed = " (**fixed**)" if setting.fixed else ""
        lines.append(item(f"**`{name}`** = `{setting.default_text}`{fixed}. {setting.reason}"))
    return "\n".join(lines) + "\n"
