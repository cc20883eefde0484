"""Programs for developers of Shoal; no part of the wheel."""
