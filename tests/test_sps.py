"""SPS tables: buckets, files, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax import sps
from dspark_jax.config import ConfigError
from dspark_jax.machine import describe_machine

TABLE = sps.SpsTable((1, 2, 4, 8), (40.0, 30.0, 32.0, 20.0), describe_machine(), "toy", "abc")


def test_a_step_runs_at_the_next_measured_bucket():
    np.testing.assert_array_equal(sps.dense(TABLE), [40, 40, 30, 32, 32, 20, 20, 20, 20])


def test_tables_go_through_files(tmp_path):
    path = tmp_path / "sps.json"
    sps.save(TABLE, path)
    assert sps.load(path) == sps.load(path, "abc") == TABLE
    with pytest.raises(ConfigError, match=r"sps\.json exists: delete it first"):
        sps.save(TABLE, path)
    with pytest.raises(ConfigError, match="no such folder"):
        sps.save(TABLE, tmp_path / "none" / "sps.json")


def test_tables_of_elsewhere_are_refused(tmp_path):
    path = tmp_path / "sps.json"
    sps.save(dataclasses.replace(TABLE, device="another machine"), path)
    with pytest.raises(ConfigError, match=r"was measured on 'another machine', this is .*eval\.step_curve --sps=FILE"):
        sps.load(path)
    assert sps.load(path, device="another machine").target == "toy"
    with pytest.raises(ConfigError, match=r"with toy \(fingerprint abc\), not with this target \(other\)"):
        sps.load(path, "other", "another machine")
    with pytest.raises(ConfigError, match=r"none\.json: there is no such file; measure one with"):
        sps.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps_per_second": (1.0, 2.0, 0.0, 3.0)}, r"SPS\(4\) = 0.0: steps per second are positive"),
        ({"steps_per_second": (1.0, -2.0, 1.0, 3.0)}, r"SPS\(2\) = -2.0"),
        ({"steps_per_second": (float("nan"), 2.0, 1.0, 3.0)}, r"SPS\(1\) = nan"),
        ({"steps_per_second": (1.0, 2.0, 1.0, float("inf"))}, r"SPS\(8\) = inf"),
        ({"steps_per_second": (1.0,)}, "4 buckets and 1 values"),
        ({"tokens": (), "steps_per_second": ()}, "0 buckets"),
        ({"tokens": (1, 4, 2, 8)}, r"buckets = \[1, 4, 2, 8\]: use ascending"),
        ({"tokens": (0, 1, 2, 8)}, "from 1 on"),
    ],
)
def test_values_that_cant_be_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TABLE, **change)
    path = tmp_path / "sps.json"
    path.write_text(json.dumps({**dataclasses.asdict(TABLE), **change}))
    with pytest.raises(ConfigError, match=message):
        sps.load(path)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"tokens": [1]}', '{"tokens": ["a"], "steps_per_second": [1]}'])
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "sps.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"sps\.json is damaged"):
        sps.load(path)
