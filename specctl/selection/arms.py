"""The arms of `specctl select`: the drafters of a pool, and how much each of them drafts."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from specctl import progress
from specctl.decoding.plain import NoDraft
from specctl.decoding.prompt_features import PromptClusters, width
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters import checkpoint, pool
from specctl.drafters.checkpoint import PROMPTS
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.drafters.hybrid.weighed import WeighedText, unweighed
from specctl.drafters.names import labels
from specctl.drafters.text.lookup import DEPTH
from specctl.drafters.tree import DepthLimited, TreeDrafter
from specctl.errors import CheckpointError, UsageError
from specctl.families import TEXT_DRAFTERS
from specctl.recipe import DraftingRecipe, PoolRecipe, SelectRecipe, ServeRecipe
from specctl.recipe.select import ArmRecipe
from specctl.selection.arm import Arm
from specctl.selection.companion import Companion

PLAIN = "no draft"
DEFAULT_POOL = Path("drafters")


def pool_paths(recipe: PoolRecipe | ServeRecipe) -> list[str]:
    """Paths and names of the pool's drafters. If there are fewer than two, the untrained drafters join.

    Raises UsageError (a drafter twice), CheckpointError (no drafter in a pool other than the default one).
    """
    named_alone = isinstance(recipe, ServeRecipe) and recipe.pool is None  # without the default pool of experiments
    names = [*([] if named_alone else map(str, _directories(recipe.pool))), *recipe.drafters]
    places = [Path(name).resolve() for name in names]  # ./a and a are the same
    twice = [name for name, place in zip(names, places, strict=True) if places.count(place) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is in the pool twice", hint="name it once")
    return names if len(names) > 1 else [*names, *(name for name in TEXT_DRAFTERS if name not in names)]


def learners_of(recipe: ServeRecipe) -> dict[Path, list[str]]:
    """Directories of the weights that learn while a recipe is served, and the drafters that draft with them. UsageError
    if there are none."""
    paths = recipe.drafters
    if recipe.chooses and not recipe.server.urls:
        by_name = {name: path for path, name in labels(pool_paths(recipe)).items()}
        paths = [by_name[name] for name in chosen_names(recipe.arms, list(by_name))]
    return pool.learnable_parts(paths)


def _directories(named: Path | None) -> list[Path]:
    """The drafter directories of a pool. The default pool may be missing or empty, another one may not."""
    if named not in (None, DEFAULT_POOL):
        return pool.find_pool(named)
    try:
        return pool.find_pool(DEFAULT_POOL) if DEFAULT_POOL.is_dir() else []
    except CheckpointError:
        return []


def load_pool(
    recipe: PoolRecipe | ServeRecipe, target: Target, paths: Iterable[str], companion: Companion | None = None
) -> dict[str, Drafter]:
    """Load the drafters by name. One that cannot be used is left out with a warning; with `strict` it is an error.

    Args:
        companion: a text drafter that every head drafts with.

    Raises CheckpointError (strict, or no drafter is left).
    """
    paths = list(paths)
    joined = [path for path in paths if path in TEXT_DRAFTERS and path not in recipe.drafters]
    if joined:
        number = len(paths) - len(joined)
        progress.log(f"a pool of {number}: {' and '.join(joined)} join it, because they need no training")
    bases: dict[str, Drafter] = {}
    drafters: dict[str, Drafter] = {}
    for path, name in labels(paths).items():
        try:
            alone = pool.load_drafter(path, target, recipe.drafting, bases)
            drafters[name] = alone if companion is None else companion.with_text_drafter(path, alone)
        except CheckpointError as error:
            if recipe.strict:
                raise
            progress.warn(f"{path} is left out of the pool: {error.message}")
    if not drafters:
        raise CheckpointError(
            "no drafter of the pool can be used", hint="run with --strict to see the error of the first one"
        )
    return {name: drafters[name] for name in chosen_names(recipe.arms, list(drafters))}


def chosen_names(arms: ArmRecipe, pool: list[str]) -> list[str]:
    """Names of the drafters that become arms. Raises UsageError if the recipe names one that the pool lacks."""
    missing = [name for name in arms.names if name not in pool]
    if missing:
        raise UsageError(f"arms.names: the pool has no {missing[0]}", hint=f"use names of {', '.join(pool)}")
    return arms.names or pool


def trained_on(places: Mapping[str, str], target: Target) -> dict[str, PromptClusters]:
    """The kinds of prompts that drafters were trained on, by name, for the drafters with a directory (`places`) that
    says so. Kinds can only be compared by the states of the same layers. So one set of layers is used: the most
    frequent one, and of equally frequent ones the deepest."""
    layers = range(1, target.num_layers + 1)
    recorded = {
        name: checkpoint.read_info(place).get(PROMPTS) for name, place in places.items() if Path(place).is_dir()
    }
    known = {
        name: (tuple(prompts["taps"]), [(kind["mean"], kind["error"]) for kind in prompts["kinds"].values()])
        for name, prompts in recorded.items()
        if prompts and all(tap in layers for tap in prompts["taps"])
        if all(len(kind["mean"]) == width(target, prompts["taps"]) for kind in prompts["kinds"].values())
    }
    counts = Counter(taps for taps, _ in known.values())
    used = max(counts, key=lambda taps: (counts[taps], taps), default=())
    return {name: PromptClusters.of(kinds, taps) for name, (taps, kinds) in known.items() if taps == used}


def make_arms(recipe: SelectRecipe, drafters: dict[str, Drafter], kinds: Mapping[str, PromptClusters]) -> list[Arm]:
    """Make one arm per drafter; or one per drafter and each of `arms.draft_nodes` and `arms.shapes`, and one plain arm.

    `kinds`: kinds of prompts that drafters were trained on. Raises UsageError if a shape is given and a drafter cannot
    change its own.
    """
    arms = recipe.arms
    if not arms.draft_nodes and not arms.shapes:
        return [Arm(name, drafter, trained_on=kinds.get(name)) for name, drafter in drafters.items()]
    made = [plain_arm()] if 0 in arms.draft_nodes else []
    own = recipe.choice == "batch"  # otherwise the texts of a batch share the rows that cost little
    for name, drafter in drafters.items():
        drafter = unweighed(drafter)  # the recipe sets the size
        made += [Arm(f"{name} ×{nodes}", drafter, nodes, weighs_rows=own) for nodes in arms.draft_nodes if nodes]
        made += [Arm(f"{name} {label(shape)}", shaped(name, drafter, shape), weighs_rows=own) for shape in arms.shapes]
    return made


def plain_arm() -> Arm:
    """The arm that drafts nothing."""
    return Arm(PLAIN, NoDraft())


def longest_draft(drafter: Drafter) -> int:
    """The longest draft of a drafter, in tokens; a hybrid's is sometimes a little longer."""
    if isinstance(drafter, Hybrid):
        return max(longest_draft(drafter.head), drafter.longest)
    if isinstance(drafter, WeighedText):
        return drafter.longest
    if hasattr(drafter, "shape"):
        return drafter.shape.depth
    if isinstance(drafter, DepthLimited):
        return drafter.depth or max(DEPTH.values())
    return 0


def label(shape: DraftingRecipe) -> str:
    """Label of a shape, such as `depth=4 width=2`, from the values it sets."""
    return " ".join(f"{key}={value}" for key, value in shape.model_dump(exclude_unset=True).items()) or "default"


def shaped(name: str, drafter: Drafter, shape: DraftingRecipe) -> Drafter:
    """Change the shape of a drafter's drafts; the new drafter and the old one use one memory."""
    if not isinstance(drafter, TreeDrafter):
        raise UsageError(f"drafter {name} has a fixed draft shape", hint="leave out arms.shapes, or the drafter")
    return drafter.shaped(shape)
