"""The cells kept aside, a third: written without a look at the rules, and no rule was tried on them.

While rules are built only the others are run. When a third is run the first time, its figures are kept (`FIRST_RUNS`):
what misses it showed were mended afterwards, those that were looked at for it (`LOOKED_AT`) count among the others
since, and further cells are written. Those that need a GPU have not been run yet.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.planted.listed import FRESH, LATER, LATEST


class FirstRun(NamedTuple):
    """Cells at their first run, before anything was mended that they showed. `error`: median of `predictions`."""

    cells: str
    with_cause: int
    right: int
    healthy: int
    alarms: int
    predictions: int | None = None
    error: float | None = None


FIRST_RUNS = (
    FirstRun("the first third", 19, 14, 3, 1),
    FirstRun("the second", 26, 23, 4, 0),
    FirstRun("45 more", 39, 37, 6, 0, 27, 0.17),
    FirstRun("20 more", 17, 14, 3, 0, 15, 0.11),
    FirstRun("the latest 20", 17, 14, 3, 0, 11, 0.03),
)

LOOKED_AT = (
    "flood_chips_two_workers",
    "graph_transformer_positions",
    "trainer_wake_words_on_a_share",
    "lightning_hard_negatives_fetched",
    "lightning_joints_drawn_in_collate",
    "lightning_loaders_made_anew",
    "lightning_seismograms_drawn",
    "trainer_singular_values_watched",
    "genome_on_a_spot_instance",
    "facts_in_micro_batches",
    "molecules_of_any_size",
    "trainer_full_stops_two_by_two",
    "level_and_trend_per_shop",
    "scene_in_a_voxel_grid",
    "garments_from_noise",
    "football_passes_to_whom",
    "lightning_frost_in_orchards",
    "lightning_spectra_to_fingerprints",
    "warehouse_played_greedily",
    "crystals_one_by_one",
    "accelerate_soil_spectra",
    "offline_lander_few_transitions",
    "seal_dives_from_depth",
    "batteries_after_a_thousand_cycles",
    "lightning_loans_added_up",
    "ballads_into_modern_words",
    "river_levels_downstream",
)

ON_GPU = (
    "gpu_lightning_prints",
    "gpu_cache_emptied_each_step",
    "gpu_slow_files",
    "gpu_pointwise_chain",
    "gpu_healthy_cnn",
    "gpu_odd_vocabulary",
)
KEPT_ASIDE = frozenset({*(planted.name for planted in (*FRESH, *LATER, *LATEST)), *ON_GPU} - {*LOOKED_AT})
