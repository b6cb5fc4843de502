"""Writes a drafter in another format, bit for bit, or says what the format can't hold.

  python -m dspark_jax.convert --from=runs/mine --to=out --format=deepspec --target=Qwen/Qwen3-4B

Formats: orbax (ours), deepspec, zlab (DFlash), speculators (vLLM); `checkpoints/drafter_formats.py` says what each
holds. Formats that carry copies of the target's embedding and head need the target.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from dspark_jax import commands
from dspark_jax.checkpoints.drafter_formats import FORMATS, read_drafter_files, write_drafter
from dspark_jax.checkpoints.load import read_target_files
from dspark_jax.config import ConfigError


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return commands.run("dspark_jax.convert", lambda: _convert(argv))


def _convert(argv: Sequence[str]) -> None:
    v = flags.FlagValues()
    flags.DEFINE_string("from", None, "Drafter: a folder in any of the formats, or a Hugging Face hub id.", v)
    flags.DEFINE_string("to", None, "Folder to write; it must not exist.", v)
    flags.DEFINE_string("format", None, f"Format to write: {', '.join(FORMATS)}.", v)
    flags.DEFINE_string("target", None, "The drafter's target: a name, folder, GGUF file or hub id.", v)
    flags.DEFINE_bool("force", False, "Take a target that the drafter was not trained for.", v)
    rest = commands.read_flags(v, argv)
    if v.help:
        print(f"{__doc__}\n{v.get_help()}")
        return
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}: every option is a --flag")
    for name in ("from", "to", "format"):
        if not v[name].value:
            raise ConfigError(f"--{name} is missing: name it, as in --from=FOLDER --to=FOLDER --format=deepspec")
    source, folder, kind = (str(v[name].value) for name in ("from", "to", "format"))
    files = read_drafter_files(source)
    target = read_target_files(v.target) if v.target else None
    write_drafter(folder, kind, files, target, v.force)
    print(f"{source} ({files.format}) written to {folder} ({kind}): {files.stored_parameters:,} parameters")


if __name__ == "__main__":
    sys.exit(main(sys.argv))
