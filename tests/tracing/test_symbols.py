"""Sizes factor uniquely, and polynomials add and multiply as numbers do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset_builder.tracing.symbols import SIZES, factor, numel, traced_sizes


def test_primes_are_distinct_and_sums_are_what_they_say():
    primes = [size.prime for size in SIZES.values()]
    assert len(set(primes)) == len(primes)
    assert all(all(p % d for d in range(2, math.isqrt(p) + 1)) and p > 5 for p in primes)
    sizes = traced_sizes()
    assert sizes["u"] == sizes["r"] + 2
    assert sizes["E"] == sizes["D"] + 2 * sizes["j"]
    assert sizes["B"] == sizes["D"] + 2 * sizes["V"]
    assert sizes["L"] == sizes["l"] + 2 * sizes["j"]


@given(st.lists(st.sampled_from(sorted(SIZES)), max_size=5), st.sampled_from([1, 2, 3, 4]))
def test_a_product_of_names_comes_back(names, multiple):
    sizes = traced_sizes()
    polynomial = factor(multiple * math.prod(sizes[name] for name in names))
    other = {name: float(index + 2) for index, name in enumerate(SIZES)}
    assert polynomial.value(other) == pytest.approx(multiple * math.prod(other[name] for name in names))


def test_a_sum_of_names_is_refused():
    sizes = traced_sizes()
    with pytest.raises(ValueError, match="not a product"):
        factor(sizes["b"] * sizes["h"] + 13 * 17)


def test_arithmetic():
    sizes = traced_sizes()
    a, b = factor(sizes["b"]), numel((sizes["h"], sizes["h"]))
    values = {"b": 3.0, "h": 5.0}
    assert (a + b).value(values) == 28.0
    assert (a * b * 2.0).value(values) == 150.0
