"""Publishing drafter versions to an engine: better versions stay, worse ones are rolled back, chance rarely decides."""

import random

import pytest

from specctl.adaptation.publication import Publisher, acceptance, accepts_less
from specctl.adaptation.traffic import ServedText
from specctl.engines.records import DraftCounters, EngineError, GenerationResult, LoadedDrafter, Refusal
from specctl.recipe import PublicationRecipe


class Engines:
    """A fake engine that accepts about `mats[version]` tokens per round, depending on the prompt."""

    def __init__(self, **mats):
        self.mats, self.served, self.asked, self.directory = mats, None, 0, None
        self.silent = self.broken = False
        self.log = []

    def answers(self, asks):
        self.asked += len(asks)
        if self.broken:
            raise EngineError("gone")
        for place, ask in enumerate(asks):
            if ask.prompt_ids == [0]:
                yield place, Refusal("too long")
                continue
            draw = random.Random(f"{ask.prompt_ids}{self.served}")
            accepted = round(100 * (self.mats[self.directory] - 1 + draw.uniform(-0.05, 0.05)))
            drafting = None if self.silent else DraftCounters(100, 300, accepted, [accepted])
            yield place, GenerationResult([1] * ask.max_new_tokens, "length", drafting)

    def publish(self, directory, version):
        assert (directory / "head").is_file()
        self.directory, self.served = (directory / "head").read_text(), version
        self.log.append(version)

    def loaded(self):
        return [LoadedDrafter(self.served, None)]


def texts(count):
    return [ServedText(str(n), "sql", [n + 1], [5] * (n + 2), began=n) for n in range(count)]


@pytest.fixture
def publisher(tmp_path):
    def make(engines, **options):
        def write(drafter, place):
            place.mkdir(parents=True)
            (place / "head").write_text(drafter)

        publisher = Publisher(engines, write, tmp_path / "versions", PublicationRecipe(**options))
        publisher.exchange("start")
        return publisher

    return make


def test_a_better_version_is_published(publisher):
    engines = Engines(start=2.0, better=2.6)
    publishing = publisher(engines)
    publication = publishing.propose("better", texts(12))
    assert publication.verdict == "published" and engines.served == publishing.version == "v000002"
    assert publication.mat_before == pytest.approx(2.0, abs=0.05)
    assert publication.mat_after == pytest.approx(2.6, abs=0.05)
    assert engines.asked == 2 * 8


def test_a_worse_version_is_rolled_back(publisher):
    engines = Engines(start=2.0, worse=1.5, better=2.5)
    publishing = publisher(engines)
    assert publishing.propose("worse", texts(12)).verdict == "rolled back"
    assert engines.directory == "start" and engines.served == publishing.version == "v000001"
    assert publishing.propose("better", texts(12)).version == "v000003" and engines.directory == "better"


def test_without_probes_a_version_is_published_unchecked(publisher):
    engines = Engines(start=2.0, worse=1.5)
    publication = publisher(engines, probes=0).propose("worse", texts(12))
    assert publication.verdict == "published" and publication.mat_after is None and not engines.asked


def test_a_version_that_could_not_be_probed_is_rolled_back(publisher):
    engines = Engines(start=2.0, next=2.0)
    publishing = publisher(engines)
    publish = engines.publish

    def then_gone(directory, version):
        publish(directory, version)
        engines.broken = version == "v000002"

    engines.publish = then_gone
    with pytest.raises(EngineError, match="gone"):
        publishing.propose("next", texts(4))
    assert engines.directory == "start" and publishing.version == "v000001"


def test_an_engine_without_draft_metrics_is_named(publisher):
    engines = Engines(start=2.0, next=2.0)
    publishing = publisher(engines)
    engines.silent = True
    with pytest.raises(EngineError) as error:
        publishing.propose("next", texts(4))
    assert "--per-request-spec-decode-metrics" in error.value.hint and engines.directory == "start"


def test_a_version_published_by_others_is_replaced(publisher):
    engines = Engines(start=2.0, better=2.6, foreign=1.2)
    publishing = publisher(engines)
    publishing.propose("better", texts(12))
    assert not publishing.restore_if_replaced(suspected=False) and not publishing.restore_if_replaced(suspected=True)
    engines.served = "v9"
    assert publishing.restore_if_replaced(suspected=False) and engines.directory == "better"
    engines.directory = "foreign"  # under our version name, so only its drafts reveal it
    assert not publishing.restore_if_replaced(suspected=False)
    assert publishing.restore_if_replaced(suspected=True) and engines.directory == "better"


def test_old_versions_are_deleted_except_the_current_one(publisher, tmp_path):
    engines = Engines(start=2.0, a=1.2, b=1.2, c=1.2, d=1.2)
    publishing = publisher(engines, keep=2)
    for name in "abcd":
        assert publishing.propose(name, texts(8)).verdict == "rolled back"
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["v000001", "v000004", "v000005"]


def test_a_restored_publisher_continues_from_its_state(publisher, tmp_path):
    engines = Engines(start=2.0, better=2.6, last=2.8)
    publishing = publisher(engines)
    publishing.propose("better", texts(9))
    again = Publisher(engines, publishing.write, tmp_path / "versions", PublicationRecipe())
    engines.served = engines.directory = None
    again.restore(publishing.state())
    assert engines.directory == "better" and again.state() == publishing.state()
    assert again.propose("last", texts(9)).version == "v000003"


def test_an_equal_version_is_rolled_back_as_rarely_as_the_level_says():
    draw = random.Random(1)

    def drafts(shift=0.0):
        return [DraftCounters(50, 150, round(50 * (1 + shift + draw.gauss(0, 0.3)))) for _ in range(8)]

    refused = sum(accepts_less(drafts(), drafts(), 0.05) for _ in range(2000)) / 2000
    assert 0.005 < refused < 0.07
    assert sum(accepts_less(drafts(), drafts(-0.8), 0.05) for _ in range(200)) / 200 > 0.9


def test_single_texts_and_texts_without_drafts_decide_nothing():
    better, less = DraftCounters(10, 30, 20), DraftCounters(10, 30, 5)
    assert not accepts_less([better], [less], 0.05) and not accepts_less([], [], 0.05)
    assert not accepts_less([better, DraftCounters()], [less, DraftCounters()], 0.05)
    assert accepts_less([better] * 2, [less] * 2, 0.05) and not accepts_less([less] * 2, [better] * 2, 0.05)


def test_a_refused_prompt_is_skipped_on_both_sides(publisher):
    engines = Engines(start=2.0, better=2.6)
    publishing = publisher(engines)
    newest = [*texts(4), ServedText("r", "sql", [0], [1, 2])]
    assert publishing.propose("better", newest).verdict == "published"


def test_acceptance_counts_rejections_in_texts_since_the_publication():
    full = DraftCounters(10, 30, 24, [10, 8, 6])  # 6 of 10 rounds were fully accepted
    served = [ServedText("a", "", [1], [1, 2], full, began=5.0), ServedText("b", "", [1], [1, 2], full, began=15.0)]
    assert acceptance(served).texts == ((24, 28), (24, 28)) and acceptance(served, since=10.0).texts == ((24, 28),)
    assert acceptance([ServedText("a", "", [1], [1, 2])]).texts == ()


def test_probes_are_repeated_if_the_drafter_is_replaced_meanwhile(publisher):
    engines = Engines(start=2.0, better=2.6, foreign=1.2)
    publishing = publisher(engines)
    answers = engines.answers

    def replaced(asks):
        if not engines.asked:
            engines.directory, engines.served = "foreign", "v9"
        return answers(asks)

    engines.answers = replaced
    publication = publishing.propose("better", texts(9))
    assert publication.mat_before == pytest.approx(2.0, abs=0.05) and publishing.restored == 1
    assert publication.verdict == "published" and engines.directory == "better"
