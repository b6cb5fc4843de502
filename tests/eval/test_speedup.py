"""Tests of the measuring, of its arithmetic and of the command `eval.speedup`."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import dspark_jax
from dspark_jax import config, sps
from dspark_jax.checkpoints import orbax_drafter
from dspark_jax.drafters.dspark import DSparkModel, shared_weights
from dspark_jax.text_stats import is_loop
from eval import bandwidth, inputs, measure, plots, speedup, step_curve

TARGET = config.DecoderConfig(
    vocab_size=97, width=32, mlp_width=64, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, max_positions=512
)
LOOKUP = 1  # one block size for all tests, so that one loop is compiled
PROMPTS = [[5, 9, 5, 9, 5], [3, 1, 4, 1, 5, 9, 2, 6]]


def _trial(accepted, verified, seconds=1.0):
    return measure.Trial(list(range(sum(accepted))), accepted, verified, seconds)


@pytest.fixture(scope="module")
def target(quick_compile):
    del quick_compile
    return dspark_jax.random_target(TARGET)


@pytest.fixture(scope="module")
def drafter_folder(target, tmp_path_factory):
    """A drafter with random weights, K = 3, in a folder as training leaves it."""
    folder = tmp_path_factory.mktemp("runs") / "drafter"
    recipe = config.RecipeConfig(target="random", random_target=TARGET, decode=config.DecodeConfig(max_new_tokens=24))
    body = dataclasses.replace(TARGET, num_layers=1)
    described = config.DrafterConfig(
        decoder=body, block_size=3, tapped_layers=(0, 1), mask_token_id=96, markov_rank=8, target_layers=3
    )
    model = DSparkModel(described, target.layout)
    features = jnp.zeros((1, 1, 2, TARGET.width))
    shared = shared_weights(target.params, None)
    init = jax.jit(lambda: model.init(jax.random.key(1), shared, features, method="init_everything")["params"])
    params = init()
    orbax_drafter.write_description(folder, described, None)
    with orbax_drafter.manager(folder) as checkpoints:
        checkpoints.save(1, args=ocp.args.Composite(params=ocp.args.StandardSave(params)))
    (folder / "data").mkdir()
    (folder / "data" / "prompts.json").write_text(json.dumps({"train": [], "heldout": PROMPTS}))
    (folder / "recipe.json").write_text(json.dumps(dataclasses.asdict(recipe)))
    return folder


def test_acceptance_by_position_counts_verified_cycles_only():
    # Draft tokens kept per cycle: 2 of 3, 0 of 3, 1 of 1; the last cycle is cut and left out.
    trials = [_trial([3, 1, 2, 1], [3, 3, 1, 3])]
    assert measure.acceptance_by_position(trials, 4) == [2 / 3, 1 / 2, 0.0, None]


def test_acceptance_by_position_of_nothing():
    assert measure.acceptance_by_position([_trial([1], [3])], 2) == [None, None]
    assert measure.acceptance_by_position([_trial([1, 1], [])], 0) == []


def test_accepted_length_weighs_cycles_not_prompts():
    assert measure.accepted_length([_trial([3, 3], [3, 3]), _trial([1], [3])]) == pytest.approx(7 / 3)


def test_speedups_compare_tokens_per_second():
    fast, slow = measure.Trial([1, 2], [2], [1], 0.5), measure.Trial([1, 2, 3], [1, 1, 1], [], 1.5)
    assert measure.speedups([fast, slow], [slow, fast]) == [2.0, 0.5]


def test_summary_of_spread_identity_and_loops():
    loop = [7] * 40
    baseline = [measure.Trial(list(range(10)), [1] * 10, [], 1.0) for _ in range(10)]
    baseline.append(measure.Trial(loop, [1] * 40, [], 4.0))
    trials = [measure.Trial(list(range(10)), [2] * 5, [1] * 5, 1 / (1 + i)) for i in range(10)]
    trials.append(measure.Trial([*loop[:-1], 8], [4] * 10, [3] * 10, 0.2))
    summary = measure.summarize("fast", trials, baseline, 3, greedy=True)
    assert summary.speedup == pytest.approx(6)  # ratios 1..10 and 20
    assert summary.speedup_p10 == pytest.approx(2)
    assert summary.speedup_p90 == pytest.approx(10)
    assert summary.identical == pytest.approx(10 / 11)
    assert summary.accepted_length == pytest.approx(140 / 60)
    assert summary.clean_speedup == pytest.approx(5.5)
    assert summary.clean_accepted_length == pytest.approx(2)
    assert summary.cycle_ms == pytest.approx(1e3 * sum(t.seconds for t in trials) / 60)
    assert measure.summarize("sampled", trials, baseline, 3, greedy=False).identical is None


def test_summary_when_every_answer_loops():
    baseline = [measure.Trial([7] * 40, [1] * 40, [], 1.0)]
    summary = measure.summarize("any", baseline, baseline, 0, greedy=True)
    assert summary.clean_speedup is None
    assert summary.clean_accepted_length is None


def test_is_loop():
    assert is_loop([1, 2, 3] * 10)
    assert not is_loop(list(range(30)))
    assert not is_loop([1] * 10)  # too short to tell


def test_render_table_aligns_columns():
    table = inputs.render_table(["method", "n"], [["a", "1.00"], ["longer one", "-"]])
    assert table.splitlines() == ["method         n", "a           1.00", "longer one     -"]


def test_weight_bytes_counts_a_tied_table_once_and_an_untied_one_not_at_all():
    table, layer = jnp.zeros((4, 2)), jnp.zeros((2, 2))
    assert bandwidth.weight_bytes({"embed": table, "layer": layer}) == 48
    assert bandwidth.weight_bytes({"embed": table, "head": table, "layer": layer}) == 48


def test_reader_measures_a_positive_bandwidth():
    assert bandwidth.make_reader(1 << 20, 1)() > 0


def test_shared_slots_fit_the_longest_prompt_and_block():
    sets = [measure.PromptSet("a", [[1] * 10]), measure.PromptSet("b", [[1] * 90])]
    assert measure.shared_slots(sets, [measure.Method("plain")], 6) == 128
    wide = measure.Method("wide", dspark_jax.prompt_lookup(40))
    assert measure.shared_slots(sets, [wide], 6) == 256


def test_run_measures_and_greedy_text_is_the_same(target):
    lookup = measure.Method("lookup", dspark_jax.prompt_lookup(LOOKUP))
    settings = measure.Settings(max_new_tokens=24, temperatures=(0.0,), repeats=1, stages=False)
    seen = []
    sets = [measure.PromptSet("mine", PROMPTS)]
    sections = measure.run(target, sets, [lookup], settings, lambda: 1e9, lambda what, done: seen.append(done))
    (section,) = sections
    baseline, looked_up = section.methods
    assert (section.prompts, sum(seen)) == (2, 2)
    assert (baseline.method, baseline.speedup, baseline.accepted_length) == (measure.BASELINE, 1.0, 1.0)
    assert looked_up.identical == 1.0
    assert looked_up.accepted_length > 1
    assert section.memory_limit == pytest.approx(1e9 / bandwidth.weight_bytes(target.params))
    assert section.memory_limit_share == pytest.approx(baseline.tokens_per_second / section.memory_limit)
    assert baseline.acceptance_by_position == []
    assert len(looked_up.acceptance_by_position) == LOOKUP
    assert looked_up.stages_ms is None


def test_thresholds_and_block_sizes_name_methods(target, drafter_folder):
    argv = ["speedup", f"--drafter={drafter_folder}", "--block_sizes=1,3", "--policies=threshold,full"]
    values = speedup.parse_flags([*argv, "--threshold=0.7"])
    methods = inputs.read_methods(values, inputs.read_recipe(values))(target)
    names = ["K=1 threshold 0.7", "K=1 full", "K=3 threshold 0.7", "K=3 full"]
    assert [method.name for method in methods] == ["prompt lookup K=3", *(f"dspark {name}" for name in names)]
    assert [method.drafter.drafter.block_size for method in methods] == [3, 1, 1, 3, 3]


def test_command_end_to_end(target, drafter_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dspark_jax, "random_target", lambda *_: target)  # the same weights, already drawn
    monkeypatch.setattr(bandwidth, "make_reader", functools.partial(bandwidth.make_reader, 1 << 22, 2))
    png, copy, table = tmp_path / "plot.png", tmp_path / "result.json", tmp_path / "sps.json"
    sps.save(step_curve.sps_table(target, {1: 0.01, 2: 0.011, 4: 0.012}, 1), table)
    arguments = f"--drafter {drafter_folder} --block_sizes=2 --policies=delayed --repeats=1"
    arguments += f" --sps={table}"
    arguments += f" --lookup_block_size={LOOKUP} --png={png} --json={copy} --config.decode.max_new_tokens=20"
    arguments += " --config.decode.top_k=9 --top_p=0.9 --verifier=block"
    code = speedup.main(["speedup", *arguments.split()])
    printed = capsys.readouterr().out.splitlines()
    assert code == 0
    result = json.loads(printed[-1])
    assert json.loads(copy.read_text()) == result
    assert png.read_bytes().startswith(b"\x89PNG")
    assert result["max_new_tokens"] == 20  # the override applies to the drafter folder's recipe
    assert "sampler  greedy; temperature 1, top_k 9, top_p 0.9, verified by block" in printed
    assert [(s["prompt_set"], s["temperature"]) for s in result["sections"]] == [("heldout", 0), ("heldout", 1)]
    names = ["autoregressive", "prompt lookup K=1", "dspark K=2 delayed"]
    for section in result["sections"]:
        assert [m["method"] for m in section["methods"]] == names
        assert all(m["tokens_per_second"] > 0 for m in section["methods"])
        assert all(set(m["stages_ms"]) == {*measure.STAGES, measure.RULES} for m in section["methods"][1:])
    assert [m["identical"] for m in result["sections"][0]["methods"]] == [1.0] * 3
    assert not any(m["by_verifier"] for m in result["sections"][0]["methods"])
    for m in result["sections"][1]["methods"][1:]:
        assert set(m["by_verifier"]) == {"token", "block"}
        assert all(1.0 <= length <= 3.0 for length in m["by_verifier"].values())  # K = 2 at most
    assert sum(line.startswith("== heldout, temperature") for line in printed) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.decode.blok=1"], "blok"),
        (["--nonsense"], "nonsense"),
        (["--temperatures=0,-1"], "--temperatures"),
        (["--temperatures=warm"], "--temperatures"),
        (["--repeats=0"], "--repeats"),
        (["--top_p=0"], "decode.top_p = 0.0: use a probability"),
        (["--verifier=tree"], "decode.verifier"),
        (["--png=/no/such/folder/a.png"], "no such folder"),
        (["--drafter=no_such_folder"], "no_such_folder"),
        (["--drafter={drafter}", "--block_sizes=9"], "trained for 1..3"),
        (["--drafter={drafter}", "--policies=best"], "use one of full, threshold"),
        (["--drafter={drafter}", "--policies=delayed"], "eval.step_curve --sps=FILE"),
        (["--drafter={drafter}", "--policies=hardware_aware", "--sps=no_such_table.json"], "no_such_table.json"),
        (["--drafter={drafter}", "--policies=conservative_tokens"], "name one or more token ids"),
        (["--drafter={drafter}", "--policies=oracle"], "policy oracle at temperature 1"),
        (["--sps=no_such_table.json"], "it needs a --drafter"),
        (["--drafter={drafter}", "--sets=general"], "no tokenizer"),
        (["--drafter={drafter}", "--prompts={prompts}"], "line 1"),
        (["--block_sizes=3"], "--drafter"),
        (["--config.target=/no/such/model"], "/no/such/model"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, drafter_folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("not json\n")
    filled = [a.format(drafter=drafter_folder, prompts=prompts) for a in arguments]
    assert speedup.main(["speedup", *filled]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert message in captured.err


def test_plot_of_nothing_verified(tmp_path):
    baseline = [_trial([1, 1], [])]
    summary = measure.summarize("plain", baseline, baseline, 0, greedy=True)
    plots.acceptance_by_position(tmp_path / "empty.png", [measure.Section("a", 0.0, 1, 0, 1.0, 1.0, 1.0, [summary])])
    assert (tmp_path / "empty.png").stat().st_size > 0
