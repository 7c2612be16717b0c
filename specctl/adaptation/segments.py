"""The order in which the segments of a stream come."""

import numpy as np
from numpy.typing import NDArray

from specctl.recipe.stream import Kind


def interleave(counts: list[int], kind: Kind, seed: int) -> NDArray[np.int64]:
    """[Σ counts] the segment of every prompt; segment i comes `counts[i]` times, with any kind of mixing.

    abrupt: one segment after the other. mix: shuffled. drift: around every change from one segment to the next, the
    share of the next one rises linearly from 0 to 1, over half of the shorter segment to each side. With segments of
    equal size the mixture changes all the time, from the middle of one segment to the middle of the next.
    """
    segments = np.repeat(np.arange(len(counts)), counts)
    random = np.random.default_rng(seed)
    if kind == "mix":
        random.shuffle(segments)
    elif kind == "drift":
        # The k-th prompt of a segment comes at a time, drawn at random, when its cumulated share is between k and k +
        # 1.
        shown = np.concatenate(([0.0], np.ones(len(segments)))).cumsum() - 0.5
        times = []
        for count, share in zip(counts, _shares(counts), strict=True):
            reached = np.concatenate(([0.0], share.cumsum() * (count / share.sum())))
            times.append(np.interp(np.arange(count) + random.random(count), reached, shown))
        segments = segments[np.argsort(np.concatenate(times), kind="stable")]
    return segments


def _shares(counts: list[int]) -> list[NDArray[np.float64]]:
    """[n] share of each segment in the mixture, by prompt. The shares at one prompt sum to 1, and the shares of one
    segment sum to its number of prompts."""
    middle = np.arange(sum(counts)) + 0.5
    gone = [np.ones(len(middle))]  # progress of the change from the segment before
    for before, after, change in zip(counts, counts[1:], np.cumsum(counts), strict=False):
        width = min(before, after) / 2
        gone.append(np.clip((middle - change + width) / (2 * width), 0, 1))
    return [came - went for came, went in zip(gone, [*gone[1:], np.zeros(len(middle))], strict=True)]
