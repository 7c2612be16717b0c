"""Tasks that are not compositions: formulas over small integers, and operations on two lists or on a list and a number."""
# ruff: noqa: E501  (one task a line)

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .code_examples import Task, digits, is_prime, numbers


def _formula(name: str, text: str, parameters: str, run: Callable[..., Any], high: int = 20) -> Task:
    """A task over one to four small positive integers."""
    names = parameters.split()
    return Task(
        name,
        text,
        tuple((p, "int") for p in names),
        type(run(*[3] * len(names))).__name__,
        lambda r: tuple(r.randint(2, high) for _ in names),
        run,
    )


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


FORMULAS: tuple[Task, ...] = (
    _formula("rectangle_area", "find the area of a rectangle", "length width", lambda a, b: a * b),
    _formula("rectangle_perimeter", "find the perimeter of a rectangle", "length width", lambda a, b: 2 * (a + b)),
    _formula("triangle_area", "find the area of a triangle from its base and height", "base height", lambda a, b: a * b / 2),
    _formula("triangle_area_sides", "find the area of a triangle from its sides, rounded to two decimals, or 0.0", "a b c",
             lambda a, b, c: round(math.sqrt(max(0, (a + b + c) * (b + c - a) * (a + c - b) * (a + b - c))) / 4, 2)),
    _formula("circle_area", "find the area of a circle, rounded to two decimals", "radius", lambda r: round(math.pi * r * r, 2)),
    _formula("sphere_volume", "find the volume of a sphere, rounded to two decimals", "radius", lambda r: round(4 / 3 * math.pi * r**3, 2)),
    _formula("cone_volume", "find the volume of a cone, rounded to two decimals", "radius height", lambda r, h: round(math.pi * r * r * h / 3, 2)),
    _formula("cylinder_surface", "find the surface area of a cylinder, rounded to two decimals", "radius height", lambda r, h: round(2 * math.pi * r * (r + h), 2)),
    _formula("cube_surface", "find the surface area of a cube", "side", lambda a: 6 * a * a),
    _formula("cuboid_volume", "find the volume of a cuboid", "length width height", lambda a, b, c: a * b * c),
    _formula("trapezoid_area", "find the area of a trapezoid", "base1 base2 height", lambda a, b, h: (a + b) * h / 2),
    _formula("hypotenuse", "find the hypotenuse of a right triangle, rounded to three decimals", "a b", lambda a, b: round(math.hypot(a, b), 3)),
    _formula("diagonal_count", "count the diagonals of a polygon with n sides", "n", lambda n: n * (n - 3) // 2),
    _formula("factorial", "compute the factorial of a number", "n", math.factorial, 12),
    _formula("fibonacci", "find the nth Fibonacci number", "n", _fibonacci, 30),
    _formula("triangular_number", "find the nth triangular number", "n", lambda n: n * (n + 1) // 2),
    _formula("pentagonal_number", "find the nth pentagonal number", "n", lambda n: n * (3 * n - 1) // 2),
    _formula("catalan_number", "find the nth Catalan number", "n", lambda n: math.comb(2 * n, n) // (n + 1), 14),
    _formula("binomial", "compute the binomial coefficient of n and k", "n k", math.comb, 12),
    _formula("permutations", "count the permutations of k out of n elements", "n k", math.perm, 9),
    _formula("gcd", "find the greatest common divisor of two numbers", "a b", math.gcd, 90),
    _formula("lcm", "find the least common multiple of two numbers", "a b", math.lcm, 40),
    _formula("gcd_three", "find the greatest common divisor of three numbers", "a b c", math.gcd, 90),
    _formula("is_prime", "check whether a number is prime", "n", is_prime, 99),
    _formula("is_perfect_square", "check whether a number is a perfect square", "n", lambda n: math.isqrt(n) ** 2 == n, 99),
    _formula("is_power_of_two", "check whether a number is a power of two", "n", lambda n: n & (n - 1) == 0, 70),
    _formula("is_harshad", "check whether a number is divisible by the sum of its digits", "n", lambda n: n % sum(digits(n)) == 0, 300),
    _formula("is_perfect", "check whether a number is perfect", "n", lambda n: sum(d for d in range(1, n) if n % d == 0) == n, 500),
    _formula("digit_sum", "find the sum of the digits of a number", "n", lambda n: sum(digits(n)), 99999),
    _formula("digit_product", "find the product of the digits of a number", "n", lambda n: math.prod(digits(n)), 9999),
    _formula("reverse_number", "reverse the digits of a number", "n", lambda n: int(str(n)[::-1]), 99999),
    _formula("count_digits", "count the digits of a number", "n", lambda n: len(str(n)), 999999),
    _formula("count_divisors", "count the divisors of a number", "n", lambda n: sum(n % d == 0 for d in range(1, n + 1)), 120),
    _formula("sum_divisors", "find the sum of the divisors of a number", "n", lambda n: sum(d for d in range(1, n + 1) if n % d == 0), 120),
    _formula("prime_factors", "find the prime factors of a number", "n", lambda n: [p for p in range(2, n + 1) if n % p == 0 and is_prime(p)], 200),
    _formula("primes_below", "list the primes below a number", "n", lambda n: [p for p in range(2, n) if is_prime(p)], 40),
    _formula("collatz_steps", "count the Collatz steps from a number to one", "n", _collatz, 60),
    _formula("to_binary", "convert a decimal number to binary", "n", lambda n: bin(n)[2:], 99),
    _formula("to_hexadecimal", "convert a decimal number to hexadecimal", "n", lambda n: hex(n)[2:], 999),
    _formula("to_octal", "convert a decimal number to octal", "n", lambda n: oct(n)[2:], 999),
    _formula("set_bits", "count the set bits of an integer", "n", int.bit_count, 999),
    _formula("toggle_bits", "toggle all bits of a number", "n", lambda n: n ^ ((1 << n.bit_length()) - 1), 99),
    _formula("xor_to_n", "find the xor of the numbers from 1 to n", "n", lambda n: n ^ 0 if n % 4 == 0 else 1 if n % 4 == 1 else n + 1 if n % 4 == 2 else 0, 60),
    _formula("power_mod", "compute a to the power of b modulo m", "a b m", pow, 30),
    _formula("arithmetic_sum", "find the sum of an arithmetic progression", "first step count", lambda a, d, n: n * (2 * a + (n - 1) * d) // 2),
    _formula("geometric_term", "find the nth term of a geometric progression", "first ratio n", lambda a, r, n: a * r ** (n - 1), 7),
    _formula("simple_interest", "compute the simple interest on a principal", "principal rate years", lambda p, r, t: p * r * t / 100, 90),
    _formula("celsius_to_fahrenheit", "convert a temperature from Celsius to Fahrenheit", "celsius", lambda c: c * 9 / 5 + 32, 99),
    _formula("minutes_to_clock", "format a number of minutes as hours and minutes", "minutes", lambda m: f"{m // 60}:{m % 60:02d}", 900),
    _formula("is_leap_year", "check whether a year is a leap year", "year", lambda y: y % 4 == 0 and (y % 100 != 0 or y % 400 == 0), 2400),
    _formula("grid_paths", "count the paths from the top left to the bottom right of a grid", "rows columns", lambda m, n: math.comb(m + n - 2, m - 1), 9),
    _formula("climb_stairs", "count the ways to climb n stairs with steps of one or two", "n", lambda n: _fibonacci(n + 1), 25),
    _formula("multiplication_row", "list the first k multiples of n", "n k", lambda n, k: [n * i for i in range(1, k + 1)], 9),
    _formula("pascal_row", "build the nth row of Pascal's triangle", "n", lambda n: [math.comb(n, k) for k in range(n + 1)], 7),
    _formula("max_of_three", "find the maximum of three numbers", "a b c", max, 99),
    _formula("median_of_three", "find the median of three numbers", "a b c", lambda *v: sorted(v)[1], 99),
    _formula("kinetic_energy", "compute the kinetic energy of a body from its mass and velocity", "mass velocity", lambda m, v: 0.5 * m * v * v),
    _formula("ohms_law", "compute the current from voltage and resistance, rounded to two decimals", "voltage resistance", lambda u, r: round(u / r, 2), 90),
    _formula("manhattan_distance", "find the Manhattan distance between two points", "x1 y1 x2 y2", lambda a, b, c, d: abs(a - c) + abs(b - d), 40),
    _formula("slope", "find the slope of the line through two points, or None for a vertical line", "x1 y1 x2 y2",
             lambda a, b, c, d: None if a == c else (d - b) / (c - a), 9),
)  # fmt: skip


def _pair(name: str, text: str, run: Callable[..., Any], extra: str = "", high: int = 6) -> Task:
    """A task over two lists, or over a list and a small number called `extra`."""
    second = (extra, "int") if extra else ("list2", "list[int]")
    draw = (lambda r: (numbers(r), r.randint(1, high))) if extra else (lambda r: (numbers(r), numbers(r)))
    kind = type(run([1, 2, 3], 2 if extra else [2, 3])).__name__
    return Task(
        name,
        text,
        (("list1" if not extra else "nums", "list[int]"), second),
        {"list": "list[int]"}.get(kind, kind),
        draw,
        run,
    )


PAIRS: tuple[Task, ...] = (
    _pair("common_elements", "find the common elements of two lists", lambda a, b: sorted(set(a) & set(b))),
    _pair("merge_sorted", "merge two lists into one sorted list", lambda a, b: sorted(a + b)),
    _pair("difference", "find the elements of the first list that are not in the second", lambda a, b: [x for x in a if x not in b]),
    _pair("union", "find the union of two lists without duplicates", lambda a, b: sorted(set(a) | set(b))),
    _pair("add_lists", "add two lists element by element", lambda a, b: [x + y for x, y in zip(a, b, strict=False)]),
    _pair("dot_product", "compute the dot product of two lists", lambda a, b: sum(x * y for x, y in zip(a, b, strict=False))),
    _pair("interleave", "interleave two lists", lambda a, b: [v for pair in zip(a, b, strict=False) for v in pair]),
    _pair("is_sublist", "check whether all elements of the second list are in the first", lambda a, b: set(b) <= set(a)),
    _pair("max_difference", "find the largest difference between elements at the same position", lambda a, b: max(abs(x - y) for x, y in zip(a, b, strict=False))),
    _pair("rotate_left", "rotate a list to the left by k positions", lambda a, k: a[k % len(a) :] + a[: k % len(a)], "k"),
    _pair("rotate_right", "rotate a list to the right by k positions", lambda a, k: a[-(k % len(a)) :] + a[: -(k % len(a))] if k % len(a) else a, "k"),
    _pair("kth_largest", "find the kth largest element of a list", lambda a, k: sorted(a)[::-1][k - 1], "k", 3),
    _pair("kth_smallest", "find the kth smallest element of a list", lambda a, k: sorted(a)[k - 1], "k", 3),
    _pair("chunks", "split a list into chunks of size n", lambda a, n: [a[i : i + n] for i in range(0, len(a), n)], "n", 4),
    _pair("every_nth", "select every nth element of a list", lambda a, n: a[::n], "n", 4),
    _pair("count_greater", "count the elements of a list that are greater than x", lambda a, x: sum(v > x for v in a), "x", 30),
    _pair("remove_all", "remove all occurrences of x from a list", lambda a, x: [v for v in a if v != x], "x", 12),
    _pair("has_pair_sum", "check whether two elements of a list add up to a target", lambda a, t: any(t - v in a[i + 1 :] for i, v in enumerate(a)), "target", 40),
    _pair("count_pairs", "count the pairs of a list whose difference is k", lambda a, k: sum(abs(x - y) == k for i, x in enumerate(a) for y in a[:i]), "k", 9),
    _pair("max_window_sum", "find the largest sum of k consecutive elements", lambda a, k: max(sum(a[i : i + k]) for i in range(len(a) - k + 1)), "k", 3),
    _pair("scale", "multiply every element of a list by a factor", lambda a, f: [v * f for v in a], "factor", 9),
    _pair("first_n_sum", "find the sum of the first n elements of a list", lambda a, n: sum(a[:n]), "n", 5),
    _pair("nearest", "find the element of a list that is nearest to x", lambda a, x: min(a, key=lambda v: abs(v - x)), "x", 30),
    _pair("insert_before", "insert x before every element of a list", lambda a, x: [v for e in a for v in (x, e)], "x", 9),
    _pair("linear_search", "find the index of a target in a list, or -1", lambda a, t: a.index(t) if t in a else -1, "target", 12),
)  # fmt: skip
