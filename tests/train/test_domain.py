"""Tests of the narrow-domain prompts and of the general prompts that stand beside them."""

import collections
import json
import re
import string
from pathlib import Path

import pytest

import eval as eval_package
from train import domain

NAMES = sorted(domain.DOMAINS)
GENERAL = Path(eval_package.__file__).parent / "prompts" / "general.jsonl"


def _all_prompts(name, split, seed=0):
    return domain.domain_prompts(name, split, seed, len(domain.DOMAINS[name].split_prompts(split)))


def _general():
    return [json.loads(line) for line in GENERAL.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_domain_is_well_formed(name):
    spec = domain.DOMAINS[name]
    assert spec.name == name
    assert len(spec.fillers) >= 200
    assert len({filler.lower() for filler in spec.fillers}) == len(spec.fillers)
    for template in spec.templates:
        assert [field for _, field, _, _ in string.Formatter().parse(template) if field] == ["filler"]


@pytest.mark.parametrize("name", NAMES)
def test_a_fifth_of_the_fillers_is_held_out(name):
    spec = domain.DOMAINS[name]
    train, held_out = spec.split_fillers("train"), spec.split_fillers("heldout")
    assert sorted(train + held_out) == sorted(spec.fillers)
    assert not set(train) & set(held_out)
    assert 0.15 <= len(held_out) / len(spec.fillers) <= 0.25


@pytest.mark.parametrize("name", NAMES)
def test_no_held_out_filler_occurs_in_a_training_prompt(name):
    text = "\n".join(_all_prompts(name, "train"))
    for filler in domain.DOMAINS[name].split_fillers("heldout"):
        bare = filler.removeprefix("the ")
        assert not re.search(rf"\b{re.escape(bare)}\b", text, re.IGNORECASE), filler


@pytest.mark.parametrize("name", NAMES)
def test_no_filler_contains_another(name):
    bare = [filler.removeprefix("the ") for filler in domain.DOMAINS[name].fillers]
    text = "\n".join(bare)
    assert [f for f in bare if len(re.findall(rf"\b{re.escape(f)}\b", text, re.IGNORECASE)) != 1] == []


@pytest.mark.parametrize("split", domain.SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_distinct_and_cover_the_split(name, split):
    spec = domain.DOMAINS[name]
    prompts = _all_prompts(name, split)
    assert len(prompts) == len(set(prompts)) == len(spec.templates) * len(spec.split_fillers(split))
    assert all("{" not in prompt and prompt == " ".join(prompt.split()) for prompt in prompts)


@pytest.mark.parametrize("split", domain.SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_deterministic(name, split):
    prompts = domain.domain_prompts(name, split, 3, 50)
    assert prompts == domain.domain_prompts(name, split, 3, 50)
    assert prompts[:20] == domain.domain_prompts(name, split, 3, 20)
    assert prompts != domain.domain_prompts(name, split, 4, 50)
    assert set(_all_prompts(name, split, 3)) == set(_all_prompts(name, split, 4))


def test_order_and_split_do_not_depend_on_the_process():
    assert domain.domain_prompts("countries", "train", 0, 2) == [
        "What is the capital of Saint Vincent and the Grenadines?",
        "List five places to visit in Nova Scotia.",
    ]
    assert domain.domain_prompts("countries", "heldout", 0, 2) == [
        "Tell me about Malta in three sentences.",
        "Which languages are spoken in the Netherlands?",
    ]


def test_a_draw_mixes_templates():
    spec = domain.DOMAINS["countries"]
    prompts = domain.domain_prompts("countries", "train", 0, 200)
    affixes = [template.split("{filler}") for template in spec.templates]
    by_template = collections.Counter(
        (head, tail)
        for prompt in prompts
        for head, tail in affixes
        if prompt.startswith(head) and prompt.endswith(tail)
    )
    assert sum(by_template.values()) == len(prompts)
    assert len(by_template) == len(spec.templates)
    assert max(by_template.values()) < 50


def test_wrong_arguments_raise():
    available = len(domain.DOMAINS["animals"].split_prompts("heldout"))
    with pytest.raises(ValueError, match=f"has {available} heldout prompts"):
        domain.domain_prompts("animals", "heldout", 0, available + 1)
    with pytest.raises(ValueError, match="cannot draw -1"):
        domain.domain_prompts("animals", "heldout", 0, -1)
    with pytest.raises(ValueError, match="unknown domain 'plants'; choose one of countries, recipes, animals"):
        domain.domain_prompts("plants", "train", 0, 1)
    with pytest.raises(ValueError, match="unknown split 'test'; choose one of train, heldout"):
        domain.domain_prompts("animals", "test", 0, 1)
    assert domain.domain_prompts("animals", "heldout", 0, 0) == []


def test_general_prompts_parse_and_are_distinct():
    rows = _general()
    assert len(rows) == 60
    for row in rows:
        assert set(row) == {"turns", "category"}
        assert row["category"]
        assert len(row["turns"]) == 1
        assert 5 <= len(row["turns"][0].split()) <= 80, row
    assert len({" ".join(row["turns"][0].lower().split()) for row in rows}) == 60
    assert len({row["category"] for row in rows}) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_general_prompts_are_not_domain_prompts(name):
    patterns = [re.escape(t).replace(re.escape("{filler}"), ".+") for t in domain.DOMAINS[name].templates]
    for row in _general():
        assert not any(re.fullmatch(pattern, row["turns"][0], re.IGNORECASE) for pattern in patterns), row
