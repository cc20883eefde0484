"""`python -m tools.reference` writes every generated page and table; `--check` only says what is out of date."""

import sys

from tools.reference.pages import out_of_date, write

if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        stale = out_of_date()
        print("\n".join(f"out of date: {name}; run `make docs`" for name in stale) or "docs/reference is up to date")
        raise SystemExit(1 if stale else 0)
    for name in write():
        print(f"wrote {name}")
