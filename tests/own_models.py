"""The examples of README.md's "Models of your own", as files."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = {
    found.group(1): block
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    if (found := re.search(r"^class (\w+)\(OwnLayer\)", block, re.MULTILINE))
}


def write_example(name: str, folder: Path, *changes: tuple[str, str], file: str = "") -> Path:
    """Write an example to a file, with some of its text changed."""
    text = EXAMPLES[name]
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    path = folder / (file or f"{name.lower()}.py")
    path.write_text(text, encoding="utf-8")
    return path
