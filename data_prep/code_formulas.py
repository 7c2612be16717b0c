"""Tasks that are not compositions: formulas over small integers, and operations on lists.

`code_tasks.txt` has the names and texts of these tasks; this module has their solutions.
"""

import math
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from .code_examples import Task, digits, is_prime, numbers
from .phrasebook import phrasebook


def _fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def _collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def _heron(a: int, b: int, c: int) -> float:
    """Area of a triangle from its sides; 0.0 if the sides form no triangle."""
    return round(math.sqrt(max(0, (a + b + c) * (b + c - a) * (a + c - b) * (a + b - c))) / 4, 2)


def _xor_to(n: int) -> int:
    return (n, 1, n + 1, 0)[n % 4]


_SOLUTIONS: dict[str, Callable[..., Any]] = {
    "rectangle_area": lambda a, b: a * b,
    "rectangle_perimeter": lambda a, b: 2 * (a + b),
    "triangle_area": lambda base, height: base * height / 2,
    "triangle_area_sides": _heron,
    "circle_area": lambda r: round(math.pi * r * r, 2),
    "sphere_volume": lambda r: round(4 / 3 * math.pi * r**3, 2),
    "cone_volume": lambda r, h: round(math.pi * r * r * h / 3, 2),
    "cylinder_surface": lambda r, h: round(2 * math.pi * r * (r + h), 2),
    "cube_surface": lambda a: 6 * a * a,
    "cuboid_volume": lambda a, b, c: a * b * c,
    "trapezoid_area": lambda a, b, h: (a + b) * h / 2,
    "hypotenuse": lambda a, b: round(math.hypot(a, b), 3),
    "diagonal_count": lambda n: n * (n - 3) // 2,
    "factorial": math.factorial,
    "fibonacci": _fibonacci,
    "triangular_number": lambda n: n * (n + 1) // 2,
    "pentagonal_number": lambda n: n * (3 * n - 1) // 2,
    "catalan_number": lambda n: math.comb(2 * n, n) // (n + 1),
    "binomial": math.comb,
    "permutations": math.perm,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "gcd_three": math.gcd,
    "is_prime": is_prime,
    "is_perfect_square": lambda n: math.isqrt(n) ** 2 == n,
    "is_power_of_two": lambda n: n & (n - 1) == 0,
    "is_harshad": lambda n: n % sum(digits(n)) == 0,
    "is_perfect": lambda n: sum(d for d in range(1, n) if n % d == 0) == n,
    "digit_sum": lambda n: sum(digits(n)),
    "digit_product": lambda n: math.prod(digits(n)),
    "reverse_number": lambda n: int(str(n)[::-1]),
    "count_digits": lambda n: len(str(n)),
    "count_divisors": lambda n: sum(n % d == 0 for d in range(1, n + 1)),
    "sum_divisors": lambda n: sum(d for d in range(1, n + 1) if n % d == 0),
    "prime_factors": lambda n: [p for p in range(2, n + 1) if n % p == 0 and is_prime(p)],
    "primes_below": lambda n: [p for p in range(2, n) if is_prime(p)],
    "collatz_steps": _collatz,
    "to_binary": lambda n: bin(n)[2:],
    "to_hexadecimal": lambda n: hex(n)[2:],
    "to_octal": lambda n: oct(n)[2:],
    "set_bits": int.bit_count,
    "toggle_bits": lambda n: n ^ ((1 << n.bit_length()) - 1),
    "xor_to_n": _xor_to,
    "power_mod": pow,
    "arithmetic_sum": lambda a, d, n: n * (2 * a + (n - 1) * d) // 2,
    "geometric_term": lambda a, r, n: a * r ** (n - 1),
    "simple_interest": lambda p, r, t: p * r * t / 100,
    "celsius_to_fahrenheit": lambda c: c * 9 / 5 + 32,
    "minutes_to_clock": lambda m: f"{m // 60}:{m % 60:02d}",
    "is_leap_year": lambda y: y % 4 == 0 and (y % 100 != 0 or y % 400 == 0),
    "grid_paths": lambda m, n: math.comb(m + n - 2, m - 1),
    "climb_stairs": lambda n: _fibonacci(n + 1),
    "multiplication_row": lambda n, k: [n * i for i in range(1, k + 1)],
    "pascal_row": lambda n: [math.comb(n, k) for k in range(n + 1)],
    "max_of_three": max,
    "median_of_three": lambda *v: sorted(v)[1],
    "kinetic_energy": lambda m, v: 0.5 * m * v * v,
    "ohms_law": lambda u, r: round(u / r, 2),
    "manhattan_distance": lambda a, b, c, d: abs(a - c) + abs(b - d),
    "slope": lambda a, b, c, d: None if a == c else (d - b) / (c - a),
    # Operations on two lists, or on a list and a number.
    "common_elements": lambda a, b: sorted(set(a) & set(b)),
    "merge_sorted": lambda a, b: sorted(a + b),
    "difference": lambda a, b: [x for x in a if x not in b],
    "union": lambda a, b: sorted(set(a) | set(b)),
    "add_lists": lambda a, b: [x + y for x, y in zip(a, b, strict=False)],
    "dot_product": lambda a, b: sum(x * y for x, y in zip(a, b, strict=False)),
    "interleave": lambda a, b: [v for pair in zip(a, b, strict=False) for v in pair],
    "is_sublist": lambda a, b: set(b) <= set(a),
    "max_difference": lambda a, b: max(abs(x - y) for x, y in zip(a, b, strict=False)),
    "rotate_left": lambda a, k: a[k % len(a) :] + a[: k % len(a)],
    "rotate_right": lambda a, k: a[-(k % len(a)) :] + a[: -(k % len(a))] if k % len(a) else a,
    "kth_largest": lambda a, k: sorted(a)[::-1][k - 1],
    "kth_smallest": lambda a, k: sorted(a)[k - 1],
    "chunks": lambda a, n: [a[i : i + n] for i in range(0, len(a), n)],
    "every_nth": lambda a, n: a[::n],
    "count_greater": lambda a, x: sum(v > x for v in a),
    "remove_all": lambda a, x: [v for v in a if v != x],
    "has_pair_sum": lambda a, t: any(t - v in a[i + 1 :] for i, v in enumerate(a)),
    "count_pairs": lambda a, k: sum(abs(x - y) == k for i, x in enumerate(a) for y in a[:i]),
    "max_window_sum": lambda a, k: max(sum(a[i : i + k]) for i in range(len(a) - k + 1)),
    "scale": lambda a, f: [v * f for v in a],
    "first_n_sum": lambda a, n: sum(a[:n]),
    "nearest": lambda a, x: min(a, key=lambda v: abs(v - x)),
    "insert_before": lambda a, x: [v for e in a for v in (x, e)],
    "linear_search": lambda a, t: a.index(t) if t in a else -1,
}


@cache
def tasks(section: str) -> tuple[Task, ...]:
    """The tasks of a section, `formulas` or `list operations`. Raises KeyError for a task without a solution."""
    return tuple(_task(*row.split(" | ")) for row in phrasebook("code_tasks")[section])


def _task(name: str, declared: str, returns: str, text: str) -> Task:
    """Build a task. Parameters are declared as `n 2-20`, an integer in a range, or as `nums`, a list of integers."""
    parameters = [(parameter, bounds) for parameter, _, bounds in (p.partition(" ") for p in declared.split(", "))]
    return Task(
        name,
        text,
        tuple((parameter, "int" if bounds else "list[int]") for parameter, bounds in parameters),
        returns,
        lambda random: tuple(_argument(random, bounds) for _, bounds in parameters),
        _SOLUTIONS[name],
    )


def _argument(random: Random, bounds: str) -> int | list[int]:
    low, _, high = bounds.partition("-")
    return random.randint(int(low), int(high)) if bounds else numbers(random)
