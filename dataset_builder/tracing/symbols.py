"""Symbolic sizes: every size a block depends on has a name and a prime, so a traced dimension factors into names.

A block is traced once at the sizes of :func:`traced_sizes`; :func:`factor` turns each traced dimension into a
monomial ``coefficient x product of names``; :class:`Polynomial` adds monomials up (bytes, FLOPs, parameters). A job's
sizes are put into the polynomials later, without tracing again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Monomial = tuple[tuple[str, int], ...]  # sorted (name, exponent)


@dataclass(frozen=True)
class Size:
    """One named size: traced at ``prime * scale``; ``scale`` is a power of two where a kernel rounds up to one."""

    prime: int
    scale: int
    meaning: str


SIZES: dict[str, Size] = {
    "b": Size(7, 1, "micro batch, sequences"),
    "s": Size(11, 32, "sequence positions of a rank (of its context shard), before sequence parallelism"),
    "z": Size(13, 32, "the same, of one tensor rank under sequence parallelism: s = t z"),
    "t": Size(17, 1, "tensor parallel ranks"),
    "c": Size(19, 1, "context parallel ranks"),
    "m": Size(23, 32, "encoder positions a cross attention sees, on a rank"),
    "o": Size(29, 32, "the same, of one tensor rank under sequence parallelism"),
    "h": Size(31, 4, "hidden size"),
    "g": Size(37, 1, "query groups on a rank"),
    "r": Size(41, 1, "query heads per group"),
    "u": Size(43, 1, "query, key and value heads per group: r + 2"),
    "d": Size(47, 4, "head dimension"),
    "f": Size(53, 1, "feed-forward columns on a rank"),
    "v": Size(59, 1, "vocabulary on a rank"),
    "p": Size(61, 1, "rows of the position table"),
    "y": Size(67, 1, "token types"),
    "e": Size(83, 1, "experts on a rank"),
    "x": Size(73, 1, "expert parallel ranks"),
    "n": Size(79, 1, "tokens of one expert that arrive at a rank, before gathering over expert-tensor ranks"),
    "k": Size(71, 1, "experts per token"),
    "a": Size(89, 1, "feed-forward columns of one expert on a rank"),
    "i": Size(97, 1, "feed-forward columns of the shared experts on a rank"),
    "q": Size(101, 1, "rank of the compressed queries (MLA)"),
    "w": Size(113, 32, "attention window, positions"),
    "j": Size(127, 1, "rotary head dimension (MLA), halves: the dimension is 2 j"),
    "M": Size(103, 1, "masked positions of a microbatch on a rank (of one tensor rank under sequence parallelism)"),
    "C": Size(107, 1, "labels of a classification head"),
    "R": Size(109, 1, "rank of the adapters (LoRA)"),
    "N": Size(131, 1, "elements the optimizer updates on a rank"),
    "G": Size(137, 1, "elements whose gradients a rank holds: N or, where only the state is sharded, more"),
}


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _sums() -> dict[str, Size]:
    """The sums that occur as one dimension get primes of their own, so the parts are chosen to make them prime."""
    taken = {size.prime for size in SIZES.values()}
    rotary = 2 * SIZES["j"].prime
    free = [number for number in range(139, 2000) if _is_prime(number) and number not in taken]
    query_key = next((n, n + rotary) for n in free if _is_prime(n + rotary))
    nope = query_key[0]
    half_value = next(n for n in free if n not in query_key and _is_prime(nope + 2 * n))
    used = {*query_key, half_value, nope + 2 * half_value}
    latent = next(n for n in free if n not in used and n + rotary not in used and _is_prime(n + rotary))
    return {
        "l": Size(latent, 1, "rank of the compressed keys and values (MLA)"),
        "D": Size(nope, 1, "query and key head dimension without rotary part (MLA)"),
        "E": Size(query_key[1], 1, "query and key head dimension (MLA): D + 2 j"),
        "V": Size(half_value, 1, "half the value head dimension (MLA)"),
        "B": Size(nope + 2 * half_value, 1, "key and value columns per head (MLA): D + 2 V"),
        "L": Size(latent + rotary, 1, "compressed keys, values and rotary key (MLA): l + 2 j"),
    }


SIZES.update(_sums())
_NAME_OF_PRIME = {size.prime: name for name, size in SIZES.items()}


def traced_sizes(one_head_per_group: bool = False) -> dict[str, int]:
    """The value of every name while tracing; a structure without query groups is traced with one head in each."""
    sizes = {name: size.prime * size.scale for name, size in SIZES.items()}
    return sizes | ({"r": 1, "u": 3} if one_head_per_group else {})


@dataclass
class Polynomial:
    """A sum of monomials with rational coefficients."""

    terms: dict[Monomial, float] = field(default_factory=dict)

    def __add__(self, other: Polynomial) -> Polynomial:
        terms = dict(self.terms)
        for monomial, coefficient in other.terms.items():
            terms[monomial] = terms.get(monomial, 0.0) + coefficient
        return Polynomial(terms)

    def __mul__(self, other: Polynomial | float) -> Polynomial:
        if not isinstance(other, Polynomial):
            return Polynomial({monomial: coefficient * other for monomial, coefficient in self.terms.items()})
        terms: dict[Monomial, float] = {}
        for left, left_coefficient in self.terms.items():
            for right, right_coefficient in other.terms.items():
                product = _multiply(left, right)
                terms[product] = terms.get(product, 0.0) + left_coefficient * right_coefficient
        return Polynomial(terms)

    def value(self, sizes: Mapping[str, float]) -> float:
        """The number at these sizes."""
        total = 0.0
        for monomial, coefficient in self.terms.items():
            for name, exponent in monomial:
                coefficient *= sizes[name] ** exponent
            total += coefficient
        return total


def _multiply(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    return tuple(sorted(exponents.items()))


def constant(value: float) -> Polynomial:
    return Polynomial({(): float(value)})


_FACTORED: dict[int, tuple[Monomial, float]] = {}


def factor(number: int) -> Polynomial:
    """A traced dimension as one monomial; raises ValueError when it is not a product of names and a small constant."""
    if number not in _FACTORED:
        rest, coefficient = number, 1.0
        exponents: dict[str, int] = {}
        for prime, name in _NAME_OF_PRIME.items():
            while rest and rest % prime == 0:
                rest //= prime
                coefficient /= SIZES[name].scale
                exponents[name] = exponents.get(name, 0) + 1
        coefficient *= rest
        # A sum of names can only pass for a product by accident; its coefficient then is no plain fraction.
        if coefficient not in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0):
            raise ValueError(f"dimension {number} is not a product of named sizes (coefficient {coefficient:g})")
        _FACTORED[number] = (tuple(sorted(exponents.items())), coefficient)
    monomial, coefficient = _FACTORED[number]
    return Polynomial({monomial: coefficient})


def numel(shape: tuple[int, ...]) -> Polynomial:
    """Elements of a traced shape."""
    product = constant(1.0)
    for dimension in shape:
        product = product * factor(dimension)
    return product
