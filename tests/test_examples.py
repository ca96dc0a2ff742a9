"""The examples run, show what they say, and are short."""

import ast
import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[1] / "examples" / "composing.py"


@pytest.fixture(scope="module")
def composing():
    spec = importlib.util.spec_from_file_location("composing", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_shorter_than_25_lines():
    functions = [node for node in ast.parse(PATH.read_text()).body if isinstance(node, ast.FunctionDef)]
    source = PATH.read_text().splitlines()
    for function in functions:
        lines = [line for line in source[function.lineno - 1 : function.end_lineno] if line.strip()]
        assert len(lines) < 25, function.name
    assert len(functions) == 4


def test_one_loss_alone(composing):
    np.testing.assert_allclose(composing.one_loss_alone(), 0.9 ** np.arange(4, -1, -1), atol=1e-2)


def test_one_update_on_a_batch(composing):
    errors = composing.one_update_on_a_batch()
    assert errors[-1] < 0.5 * errors[0]


def test_a_network_of_your_own(composing):
    errors = composing.a_network_of_your_own()
    assert errors[0] > 1.0 and errors[-1] < 0.01


def test_an_environment_of_your_own(composing):
    returns = composing.an_environment_of_your_own()
    assert returns[-1] > 0.5 * returns[0]  # both negative: less than half as far apart
