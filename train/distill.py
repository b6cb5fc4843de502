"""Distil a DSpark drafter from a target.

  python -m train.distill --config configs/smollm2_demo.py [--config.field=value ...] [--resume]

Makes the data if there is none (the target answers prompts, and what training reads of the target is kept), trains with
the three losses, evaluates by real decoding on held-out prompts, saves Orbax checkpoints. Everything goes to the folder
`config.out`; a run that was interrupted, at whatever point, continues with --resume to the same losses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tqdm
from absl import flags, logging
from ml_collections import config_flags

import dspark_jax
from dspark_jax import commands
from dspark_jax import config as config_lib
from dspark_jax.checkpoints import orbax_drafter
from dspark_jax.checkpoints.target_files import CheckpointError
from dspark_jax.config import ConfigError, DrafterConfig, RecipeConfig
from dspark_jax.drafters.dspark import DSparkDrafter, DSparkModel, SharedWeights, shared_weights
from dspark_jax.loading import Target
from dspark_jax.text_stats import is_loop
from train import data, draft_vocab, losses, make_data, optimizer, starts, step
from train.metrics import MetricsWriter

RECIPE_FILE = "recipe.json"
# Fields that don't change what a run computes: they may differ when it resumes.
FREE_FIELDS = ("out", "decode", "train.eval_every", "train.eval_prompts", "train.eval_new_tokens", "train.log_every")


def say(message: str) -> None:
    """Tells the user what is happening, above any progress bar."""
    tqdm.tqdm.write(message, file=sys.stderr)


def load_recipe_target(recipe: RecipeConfig) -> Target:
    """Loads the recipe's target, or makes the random one."""
    dtype = jnp.dtype(recipe.dtype)
    if recipe.target == "random":
        return dspark_jax.random_target(recipe.random_target, recipe.data.seed, dtype)
    return dspark_jax.load_target(recipe.target, dtype)


def drafter_config(recipe: RecipeConfig, target: Target) -> DrafterConfig:
    """Resolves the recipe's drafter for a target."""
    cfg = recipe.drafter
    width = cfg.mlp_width or target.config.mlp_width
    body = dataclasses.replace(target.config, num_layers=cfg.num_layers, mlp_width=width, sliding_layers=())
    mask = cfg.mask_token_id
    if mask < 0:
        unused = target.tokenizer.unused_control_token() if target.tokenizer else None
        mask = target.config.vocab_size - 1 if unused is None else unused
    return DrafterConfig(
        decoder=body,
        block_size=cfg.block_size,
        tapped_layers=make_data.tapped_layers(recipe, target),
        mask_token_id=mask,
        anchor_layout=cfg.anchor_layout,
        sequential_head=cfg.sequential_head,
        markov_rank=cfg.markov_rank if cfg.sequential_head != "none" else 0,
        confidence_head=cfg.confidence_head,
        confidence_reads_markov=cfg.confidence_reads_markov and cfg.sequential_head != "none",
        draft_vocab_size=cfg.draft_vocab_size if cfg.draft_vocab_size < target.config.vocab_size else 0,
        target_layers=target.config.num_layers,
        target_fingerprint=target.config.fingerprint(),
        target_name=target.name,
        chat_template_hash=target.tokenizer.chat_template_hash if target.tokenizer else "",
    )


def claim_folder(recipe: RecipeConfig, resume: bool) -> Path:
    """Makes sure that the output folder is this run's, and writes the resolved recipe into it.

    Raises:
      ConfigError: the folder holds another run, or this one without --resume.
    """
    folder, values = Path(recipe.out), dataclasses.asdict(recipe)
    path = folder / RECIPE_FILE
    if path.exists():
        if not resume:
            raise ConfigError(
                f"config.out = {recipe.out}: holds a run already; pass --resume, or choose another folder"
            )
        stored = dataclasses.asdict(config_lib.from_config_dict(json.loads(path.read_text())))  # new fields filled in
        differing = sorted(set(_flat(values).items()) ^ set(_flat(stored).items()))
        names = sorted({name for name, _ in differing if not name.startswith(FREE_FIELDS)})
        if names:
            raise ConfigError(f"config.out = {recipe.out}: holds a run with another {', '.join(names)}; choose another")
    data.write_json(path, values)
    return folder


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: json.dumps(value)}
    return flat


def prepare_data(recipe: RecipeConfig, target: Target, folder: Path) -> tuple[data.Dataset, list[list[int]]]:
    """Makes or completes the data, with a progress bar. Returns the dataset and the held-out prompts."""
    bars: dict[str, tqdm.tqdm] = {}

    def progress(what: str, more: int, total: int) -> None:
        if what not in bars:
            bars[what] = tqdm.tqdm(total=total, desc=f"target writes {what}", unit="", dynamic_ncols=True)
        bars[what].update(more)

    prompts = make_data.make_data(recipe, target, folder / "data", progress)
    for bar in bars.values():
        bar.close()
    dataset = data.read_dataset(folder / "data", recipe.data.drop_loops)
    say(f"data: {len(dataset)} of {len(prompts['train'])} answers kept, {dataset.answer_tokens} answer tokens")
    return dataset, prompts["heldout"]


def initial_params(
    recipe: RecipeConfig, model: DSparkModel, shared: SharedWeights, target: Target, dataset: data.Dataset
) -> Any:
    """Returns the drafter's starting parameters."""
    vocab = None if shared.vocab is None else np.asarray(shared.vocab)
    params = starts.random_params(model, shared, recipe.train.seed)
    if recipe.drafter.init_layers_from_target:
        params = starts.layers_from_target(params, model.config, target.params, target.config.num_layers)
    if recipe.drafter.init_markov_from_bigrams and model.config.sequential_head in ("vanilla", "gated"):
        params = starts.markov_from_bigrams(params, model.config, dataset.tokens, vocab)
    if recipe.drafter.init_from:
        params = starts.from_drafter(params, model.config, vocab, Path(recipe.drafter.init_from), target.dtype)
    return params


def evaluate(recipe: RecipeConfig, target: Target, drafter: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Decodes held-out prompts for real, greedily, and measures the accepted length."""
    prompts = prompts[: recipe.train.eval_prompts]
    batch = dspark_jax.generate(
        target,
        prompts,
        drafter=drafter,
        max_new_tokens=recipe.train.eval_new_tokens,
        cache_slots=-(-(recipe.data.max_prompt_tokens + recipe.train.eval_new_tokens + 32) // 128) * 128,
    )

    def accepted(rows) -> float:
        cycles = sum(len(row.accepted_lengths) for row in rows)
        return sum(len(row.token_ids) for row in rows) / cycles if cycles else float("nan")

    no_loops = [row for row in batch.rows if not is_loop(row.token_ids)]
    return {
        "accepted_length": accepted(batch.rows),
        "accepted_length_no_loops": accepted(no_loops),
        "answers": len(batch.rows),
        "answers_no_loops": len(no_loops),
    }


def run(recipe: RecipeConfig, resume: bool) -> dict[str, float]:
    """Runs a recipe from data to the last evaluation, which it returns."""
    started = time.perf_counter()
    say(f"loading {recipe.target}")
    target = load_recipe_target(recipe)
    config = drafter_config(recipe, target)
    if recipe.drafter.init_from:
        starts.check_drafter(config, Path(recipe.drafter.init_from))
    folder = claim_folder(recipe, resume)
    dataset, heldout = prepare_data(recipe, target, folder)

    vocab = None
    if config.draft_vocab_size:
        counts = draft_vocab.token_counts(dataset.tokens, dataset.prompt_lengths, target.config.vocab_size)
        stop_ids = target.tokenizer.eos_ids if target.tokenizer else ()
        vocab = draft_vocab.choose(counts, dataset.mass, config.draft_vocab_size, stop_ids)
        say(f"draft vocabulary: {len(vocab)} tokens cover {draft_vocab.coverage(counts, vocab):.1%} of the answers")
    orbax_drafter.write_description(folder, config, vocab)
    model = DSparkModel(config, target.layout, target.dtype)
    shared = shared_weights(target.params, None if vocab is None else jnp.asarray(vocab))
    transform = optimizer.make_optimizer(recipe.train)
    params = initial_params(recipe, model, shared, target, dataset)
    state = step.TrainState(params=params, optimizer=transform.init(params), step=jnp.zeros((), jnp.int32))

    checkpoints = orbax_drafter.manager(folder)
    if resume and checkpoints.latest_step() is not None:
        state = restore(checkpoints, state)
    first = int(state.step)
    say(f"training: steps {first}..{recipe.train.steps} of {recipe.train.batch_size} x {recipe.train.anchors} anchors")
    cfg = recipe.train
    train_step = jax.jit(
        functools.partial(
            step.train_step,
            model,
            transform,
            losses.LossWeights(ce=cfg.ce_weight, l1=cfg.l1_weight, confidence=cfg.confidence_weight),
            cfg.decay,
            cfg.anchors,
            cfg.loss_chunk,
            cfg.loss_kernel,
        ),
        donate_argnums=(1,),
    )
    drafter = lambda params: dspark_jax.LoadedDrafter(  # noqa: E731
        DSparkDrafter(model, config.block_size), {"model": params, "shared": shared}, "dspark"
    )
    metrics = MetricsWriter(folder, first)
    results: dict[str, float] = {}
    bar = tqdm.tqdm(initial=first, total=cfg.steps, desc="distil", unit="step", dynamic_ncols=True)
    for done, batch in enumerate(data.batches(dataset, cfg, first), first + 1):
        with jax.default_matmul_precision(cfg.matmul_precision):
            state, values = train_step(shared, state, batch, cfg.seed)
        if done % cfg.log_every == 0 or done == cfg.steps:
            numbers = {key: float(value) for key, value in values.items()}
            metrics.write("metrics", done, {**numbers, "seconds": time.perf_counter() - started})
            bar.set_postfix(loss=f"{numbers['loss']:.3f}", acceptance=f"{numbers['expected_acceptance']:.3f}")
        bar.update(1)
        if done % cfg.save_every == 0 or done == cfg.steps:
            save(checkpoints, state)
        if (cfg.eval_every and done % cfg.eval_every == 0) or done == cfg.steps:
            results = evaluate(recipe, target, drafter(state.params), heldout)
            metrics.write("eval", done, {**results, "seconds": time.perf_counter() - started})
            say(
                f"step {done}: accepted length {results['accepted_length']:.3f} on {len(heldout[: cfg.eval_prompts])}"
                f" held-out prompts, {results['accepted_length_no_loops']:.3f} without looping answers"
            )
    bar.close()
    metrics.close()
    checkpoints.close()
    say(f"done in {time.perf_counter() - started:.0f} s: {folder}")
    return results


def save(checkpoints: ocp.CheckpointManager, state: step.TrainState) -> None:
    """Saves parameters and optimiser; atomic, a kill during it leaves the checkpoint before."""
    arguments = ocp.args.Composite(
        params=ocp.args.StandardSave(state.params), optimizer=ocp.args.StandardSave(state.optimizer)
    )
    checkpoints.save(int(state.step), args=arguments)
    checkpoints.wait_until_finished()


def restore(checkpoints: ocp.CheckpointManager, state: step.TrainState) -> step.TrainState:
    """Restores the latest checkpoint into a state of the same shapes."""
    latest = checkpoints.latest_step()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (state.params, state.optimizer))
    try:
        restored = checkpoints.restore(
            latest,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract[0]), optimizer=ocp.args.StandardRestore(abstract[1])
            ),
        )
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"checkpoint of step {latest} can't be read: {error}") from error
    return step.TrainState(
        params=restored["params"], optimizer=restored["optimizer"], step=jnp.asarray(latest, jnp.int32)
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    return commands.run("train.distill", lambda: _distill(argv), data.DataError)


def _distill(argv: Sequence[str]) -> None:
    v = flags.FlagValues()
    with commands.config_errors():
        config_flags.DEFINE_config_file(
            "config", None, "Recipe to run, a file of configs/.", flag_values=v, sys_argv=list(argv)
        )
        flags.DEFINE_bool("resume", False, "Continue the run in config.out.", v)
        rest = commands.read_flags(v, argv)
    if v.help:
        print(f"{__doc__}\n{v.get_help()}")
        return
    if rest:
        raise ConfigError(f"unexpected argument {rest[0]!r}; overrides look like --config.train.steps=10")
    if v.config is None:
        raise ConfigError("--config is missing: name a recipe, such as --config configs/smollm2_demo.py")
    logging.set_verbosity(logging.WARNING)  # Orbax reports every file it writes
    with commands.config_errors():
        values = v.config.to_dict()
    run(config_lib.from_config_dict(values), v.resume)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
