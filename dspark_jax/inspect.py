"""Says what a checkpoint is, target or drafter, in any format; reads headers, not weights.

  python -m dspark_jax.inspect PATH_OR_ID [--json]

PATH_OR_ID is what `load_target` or `load_drafter` takes: a folder, a GGUF file, a Hugging Face hub id, or
smollm2-135m-instruct.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dspark_jax import commands
from dspark_jax.checkpoints.describe import describe
from dspark_jax.config import ConfigError


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return commands.run("dspark_jax.inspect", lambda: _inspect(argv))


def render(facts: Mapping[str, Any]) -> str:
    """Renders the facts of `describe` as one line each."""
    lines = [f"{facts['name']}: {facts['kind']}, format {facts['format']}"]
    for name, value in facts.items():
        if name in ("name", "kind", "format", "bytes_in_bfloat16", "odd"):
            continue
        if name == "parameters":
            lines.append(f"  {'parameters':24}{value:,} ({facts['bytes_in_bfloat16'] / 1e6:,.1f} MB in bfloat16)")
        elif isinstance(value, Mapping):
            inner = ", ".join(f"{key} {item}" for key, item in value.items() if item not in ("", 0))
            lines.append(f"  {name.replace('_', ' '):24}{inner or '-'}")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"  {name.replace('_', ' '):24}{'-' if shown in ('', None) else shown}")
    return "\n".join([*lines, *(f"  odd: {note}" for note in facts["odd"])])


def _inspect(argv: Sequence[str]) -> None:
    v = flags.FlagValues()
    flags.DEFINE_bool("json", False, "Print one JSON object.", v)
    names = commands.read_flags(v, argv)
    if v.help:
        print(f"{__doc__}\n{v.get_help()}")
        return
    if len(names) != 1:
        raise ConfigError(f"{len(names)} checkpoints named ({' '.join(names)}): name one, a path or a hub id")
    facts = describe(names[0])
    print(json.dumps(facts) if v.json else render(facts))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
