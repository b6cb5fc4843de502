"""The loop itself, checked as `eval.exactness` does it: drawn text follows the target, greedy text is the target's."""

import dataclasses
import json
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import dspark_jax
from dspark_jax import schedules, sps
from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.drafters.dspark import DSparkDrafter, DSparkModel, shared_weights
from dspark_jax.generation import LoadedDrafter
from dspark_jax.scheduler import Policy
from eval import exact, exactness

BATCH = 8192
SIZE = 2  # K
PROMPT = [5]
SAMPLES = 25_600  # per sampler; four samplers, so 102,400 pairs per method
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
SAMPLERS = [
    {"temperature": 0.0, **OFF, "repetition_penalty": 1.5},
    {"temperature": 1.0, **OFF},
    {"temperature": 0.7, **OFF, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.3, **OFF, "min_p": 0.05, "repetition_penalty": 1.3},
]
JAGGED = sps.SpsTable(
    tokens=tuple(range(BATCH, BATCH * (SIZE + 1) + 1, BATCH // 2)),
    steps_per_second=(1.0, 0.97, 0.7, 0.78, 0.75),
    device="here",
    target="toy",
    fingerprint="abc",
)
LOSSLESS = (
    schedules.full(),
    schedules.threshold(0.5),
    schedules.adaptive_threshold(start=0.5),
    schedules.context_complexity(base=0.3, coefficient=0.4, window=2),
    schedules.conservative_tokens([1, 4]),
    schedules.hardware_aware(JAGGED),
    schedules.delayed(JAGGED),
)
CHOSEN = {"token": (0, 3, 5), "block": (1, 2, 4, 6)}  # which of them each verifier is tested with


@pytest.fixture(scope="module")
def target() -> dspark_jax.Target:
    """Two random layers over twelve tokens, loud enough that a text says something about the next token."""
    made = dspark_jax.random_target(
        DecoderConfig("llama", 12, 16, 24, 2, 2, 1, 8, 1e4, 1e-6, False, False, 256), seed=2
    )
    loud = lambda name: 30.0 if name == "head" else 6.0 if name.startswith("layers_") else 1.0  # noqa: E731
    params = {k: jax.tree.map(lambda w, k=k: w * loud(k) if w.ndim == 2 else w, v) for k, v in made.params.items()}
    return dataclasses.replace(made, params=params)


@pytest.fixture(scope="module")
def drafter(target) -> LoadedDrafter:
    """A random drafter with a reduced vocabulary that agrees with the target now and then."""
    config = DrafterConfig(
        decoder=dataclasses.replace(target.config, num_layers=1),
        block_size=SIZE,
        tapped_layers=(-1, 0),
        mask_token_id=3,
        markov_rank=4,
        draft_vocab_size=9,
        target_layers=2,
    )
    model = DSparkModel(config, target.layout)
    shared = shared_weights(target.params, jnp.asarray([0, 1, 2, 4, 5, 7, 8, 10, 11]))
    features = jnp.zeros((1, 1, 2, config.decoder.width))
    params = jax.jit(lambda key: model.init(key, shared, features, method="init_everything"))(jax.random.key(1))
    params = jax.tree.map(lambda w: w * 8 if w.ndim == 2 else w, params["params"])
    return LoadedDrafter(DSparkDrafter(model, SIZE), {"model": params, "shared": shared}, "dspark")


@pytest.fixture
def quickly():
    """As `quick_compile`, for the tests here that run what they compile for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def distributions(target):
    return [exact.pair_distribution(target, PROMPT, sampler, 12) for sampler in SAMPLERS]


@struct.dataclass
class Peeking(Policy):
    """Skips verification when the draft is token 1 or 4: it looks at the token that it decides about."""

    name = "peeking"

    def verify_length(self, state, draft, active):
        del state, active
        return jnp.where((draft.token_ids[:, 0] == 1) | (draft.token_ids[:, 0] == 4), 0, draft.length)


@struct.dataclass
class OneOf(Policy):
    """Does what one of several policies says; which one is a leaf, so that one compiled loop serves them all."""

    policies: tuple[Policy, ...]
    chosen: int

    name = "one of"

    @property
    def reads_target(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(policy.reads_target for policy in self.policies)

    def init_state(self, batch, block_size):
        return tuple(policy.init_state(batch, block_size) for policy in self.policies)

    def verify_length(self, state, draft, active):
        def of(policy, own):
            return lambda: policy.verify_length(own, draft, active)

        return jax.lax.switch(self.chosen, [of(policy, own) for policy, own in zip(self.policies, state)])

    def update(self, state, feedback):  # the other policies' states move along, nobody reads them
        return tuple(policy.update(own, feedback) for policy, own in zip(self.policies, state))


# What each verifier is tested with; the last policy of "token" is not one that may pass.
POLICIES = {name: tuple(LOSSLESS[i] for i in chosen) for name, chosen in CHOSEN.items()}
POLICIES["token"] += (Peeking(),)


def pairs(target, drafter, distributions, chosen, verifier):
    policies = POLICIES[verifier]
    widths = (SIZE + 1,)  # among thousands of rows one always wants it; narrower ones would be compiled for nothing
    method = exact.Method(f"{policies[chosen].name} {verifier}", drafter, OneOf(policies, chosen), verifier, widths)
    return exact.sampled_pairs(target, PROMPT, method, SAMPLERS, SAMPLES, BATCH, chosen, distributions)


def test_drawn_pairs_follow_the_target(target, drafter, distributions):
    """102,400 pairs for each policy, by either verifier, greedy beside sampled rows, one verdict for all."""

    def of(verifier):
        return [pairs(target, drafter, distributions, i, verifier) for i in range(len(CHOSEN[verifier]))]

    with futures.ThreadPoolExecutor() as pool:  # small operations, each on one core: two at a time
        checks = [check for groups in pool.map(of, CHOSEN) for group in groups for check in group]
    assert {i for chosen in CHOSEN.values() for i in chosen} == set(range(len(LOSSLESS)))
    assert len(checks) == sum(map(len, CHOSEN.values())) * len(SAMPLERS)
    assert all(check.samples == SAMPLES for check in checks)
    failed = [check for check in exact.judge(checks) if not check.passed]
    assert not failed


def test_a_policy_that_peeks_is_caught(target, drafter, distributions):
    checks = exact.judge(pairs(target, drafter, distributions, len(CHOSEN["token"]), "token"))
    assert checks[0].passed  # greedy text is the target's whatever the policy
    assert not checks[1].passed


def test_chi_square_by_hand():
    statistic, freedom, p_value = exact.chi_square(
        np.array([30.0, 14, 34, 45, 57, 20]), np.array([20.0, 20, 30, 40, 60, 30])
    )
    assert statistic == pytest.approx(11.4417, abs=1e-3)
    assert freedom == 5
    assert p_value == pytest.approx(0.0433, abs=1e-4)


def test_chi_square_pools_rare_cells_and_knows_the_impossible():
    statistic, freedom, _ = exact.chi_square(np.array([48.0, 48, 2, 2, 0]), np.array([46.0, 46, 3, 3, 2]))
    assert freedom == 2
    assert statistic == pytest.approx(2 * 4 / 46 + 16 / 8)
    assert exact.chi_square(np.array([99.0, 1]), np.array([100.0, 0]))[2] == 0.0


def test_holm_rejects_what_is_small_enough_for_their_number():
    checks = [exact.Check("x", "m", 1, 0.0, p, True) for p in (0.5, 0.006, 0.002, 0.0011)]
    assert [c.passed for c in exact.judge(checks, 0.01)] == [True, True, False, False]


@pytest.mark.usefixtures("quickly")
def test_cache_and_batch_checks(target, drafter):
    method = exact.Method("full token", drafter)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2], [11]]
    assert exact.batch_invariant(target, prompts, method, 16).passed
    rows = dspark_jax.generate(target, prompts, drafter=drafter, temperature=1.0, max_new_tokens=24).rows
    accepted = [n for row in rows for n in row.accepted_lengths]
    assert {1, 2, 3} == set(accepted)  # these models have something to decide: drafts are kept and rejected
    check = exact.cache_equivalent(target, prompts, method, 16, 1e-4)
    assert check.passed
    assert 0 < check.statistic < 1e-4  # rounding, and something was compared


@pytest.mark.usefixtures("quickly")
def test_greedy_check_reports_the_margin_where_texts_part(target, drafter):
    prompts = [[1, 2, 3], [4]]
    right = [row.token_ids for row in dspark_jax.generate(target, prompts, max_new_tokens=12).rows]
    method = exact.Method("full token", drafter)
    assert exact.greedy_identical(target, prompts, method, 2, 12, right, 0.0).passed
    wrong = [[*right[0][:5], (right[0][5] + 1) % 12, *right[0][6:]], right[1]]
    check = exact.greedy_identical(target, prompts, method, 2, 12, wrong, 0.0)
    assert not check.passed
    assert check.statistic == 1
    assert "margins" in check.detail
    assert exact.greedy_identical(target, prompts, method, 2, 12, wrong, 1e9).passed


def command(capsys, *extra):
    code = exactness.main(["eval.exactness", "--config", "configs/tiny.py", *extra])
    return code, capsys.readouterr()


@pytest.mark.usefixtures("quickly")
def test_command(capsys):
    few = ["--num_prompts=2", "--samples=300", "--rows=300", "--max_new_tokens=8", "--lookup_block_size=1"]
    code, output = command(capsys, *few, "--verifiers=block", "--checks=greedy,sampled,cache", "--batches=2")
    assert code == 0
    table, _, last = output.out.rstrip().rpartition("\n")
    assert "all exact" in table
    result = json.loads(last)
    assert result["passed"]
    assert len(result["checks"]) == 1 + 3 + 1  # one batch size, three samplers
    assert all(check["p_value"] is not None for check in result["checks"] if check["name"].startswith("two tokens"))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--samples=0", "--samples = 0: use 1 or more"),
        ("--checks=greedy,speed", "--checks = speed: use greedy, sampled, batch, cache"),
        ("--verifiers=tokens", "--verifiers = tokens: use token, block"),
        ("--samplers=heat=1", "--samplers = heat=1: use temperature"),
        ("--samplers=temperature=hot", "expected a comma list of numbers"),
        ("--samplers=top_p=1.5", "top_p = 1.5: use a probability above 0"),
        ("--batches=0", "--batches = 0: use 1 or more"),
        ("--alpha=2", "--alpha = 2.0: use a probability"),
        ("--policies=full", "it needs a --drafter"),
    ],
)
def test_bad_input_is_one_line(capsys, flag, message):
    code, output = command(capsys, flag)
    assert code == 2
    assert message in output.err
    assert output.err.count("\n") == 1
