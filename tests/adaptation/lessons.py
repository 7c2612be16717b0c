"""Helpers to compare learners in several processes: answer questions with a small target, and learn the answers."""

from specctl.adaptation.updates.watchdog import Acceptance
from specctl.adaptation.worker import Chunk
from specctl.decoding.records import Label
from specctl.decoding.sampling import GREEDY
from tests.measuring.streams import QUESTIONS
from tests.toys.decoding import decode, filling

ACCEPTANCE = Acceptance.of([(5, 10)])


def answered(pupil, target, questions=QUESTIONS, tokens=16):
    """Return the chunk of a pupil's answers."""
    prompts = [target.render([{"role": "user", "content": text}]) for text in questions]
    options = {"sampling": GREEDY, "max_new_tokens": tokens, "seeds": [0] * len(prompts)}
    labels = [Label(text, "sql") for text in questions]
    decode(target, prompts, controller=pupil.controller, labels=labels, **options, **filling(pupil.buffer))
    chunk = Chunk.of(pupil.buffer, ACCEPTANCE)
    pupil.buffer.clear()
    return chunk


def taught(pupil, chunks):
    """Teach chunks to a pupil; return its lessons and the vector it then plays [P]."""
    lessons = []
    for chunk in chunks:
        chunk.into(pupil.buffer)
        lessons.append(pupil.learn(chunk.acceptance))
    return lessons, pupil.played()
