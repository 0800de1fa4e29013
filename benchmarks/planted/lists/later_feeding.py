"""Cells on feeding, written without a look at the rules after the fresh ones."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

LATER_FEEDING: tuple[Planted, ...] = (
    Planted(
        "lightning_galaxies_in_the_archive", ("storage_bound",),
        "each cutout is waited for 4 ms in the process that trains",
        (("num_workers=0", "num_workers=4, persistent_workers=True"),),
        framework="lightning", batch=16, steps=30, warmup=5,
    ),
    Planted(
        "trainer_plankton_from_the_buoy", ("storage_bound",),
        "each vignette is waited for 3 ms in the process that trains",
        (("dataloader_num_workers=0", "dataloader_num_workers=4,\n    dataloader_persistent_workers=True"),),
        framework="transformers", batch=16, steps=30, warmup=5,
    ),
    Planted(
        "river_levels_downstream", ("storage_bound",),
        "one worker makes two requests of 2.5 ms for each window, which is five times as long as a step",
        (("num_workers=1, persistent_workers=True", "num_workers=4, persistent_workers=True"),),
        batch=16, steps=32, warmup=8,
    ),
    Planted(
        "accelerate_stars_that_vary", ("cpu_preprocessing",),
        "the same periodogram of a star is calculated anew in each epoch",
        (
            (
                "        self.angular = 2 * np.pi * np.linspace(0.05, 2.5, survey.frequencies)\n",
                "        self.angular = 2 * np.pi * np.linspace(0.05, 2.5, survey.frequencies)\n"
                "        self.powers = [self.power(star) for star in range(len(self.kinds))]\n",
            ),
            ("return self.power(star), int", "return self.powers[star], int"),
        ),
        framework="accelerate", batch=24, steps=32, warmup=5,
    ),
    Planted(
        "whales_in_a_narrow_strait", ("cpu_preprocessing",),
        "echoes are added by a convolution sample by sample; by Fourier transforms it takes a tenth of that",
        (("np.convolve(self.heard[i], self.echoes())", "signal.fftconvolve(self.heard[i], self.echoes())"),),
        batch=16, steps=20, warmup=5,
    ),
    Planted(
        "lightning_go_moves_of_masters", ("cpu_preprocessing",),
        "the planes of a board are found in Python, point by point, each time it is played",
        (
            ("self.boards = boards\n", "self.planes = [features(board) for board in boards]\n"),
            ("planes = features(self.boards[index])", "planes = self.planes[index]"),
        ),
        framework="lightning", batch=64, steps=32, warmup=16,
    ),
    Planted(
        "football_passes_to_whom", ("slow_collate",),
        "what lies between any two players is worked out pair by pair in Python for each batch",
        ((
            """    between = []
    for moment in moments:
        rows = []
        for (x, y), (u, v), side in zip(moment["at"], moment["speed"], SIDES, strict=True):
            row = []
            for (to_x, to_y), (to_u, to_v), to_side in zip(moment["at"], moment["speed"], SIDES, strict=True):
                away = math.hypot(to_x - x, to_y - y)
                parting = ((to_u - u) * (to_x - x) + (to_v - v) * (to_y - y)) / (away + 1.0)
                row.append([away / 10, parting, float(side == to_side)])
            rows.append(row)
        between.append(rows)
    between = torch.tensor(between)
    owner = F.one_hot(torch.tensor([moment["owner"] for moment in moments]), PLAYERS)
    side = torch.tensor(SIDES).expand(len(moments), -1)
""",
            """    side = torch.tensor(SIDES).expand(len(moments), -1)
    way, change = (known[:, None] - known[:, :, None] for known in (at, speed))
    away = way.norm(dim=-1)
    parting = (way * change).sum(dim=-1) / (away + 1.0)
    between = torch.stack([away / 10, parting, (side[:, None] == side[:, :, None]).float()], dim=-1)
    owner = F.one_hot(torch.tensor([moment["owner"] for moment in moments]), PLAYERS)
""",
        ),),
        batch=48, steps=40, warmup=5,
    ),
    Planted(
        "kelp_along_the_transects", ("worker_restart",),
        "both workers are started anew for each epoch of eight steps",
        (("num_workers=2", "num_workers=2, persistent_workers=True"),),
        batch=16, steps=40, warmup=8, profiled=64,
    ),
    Planted(
        "clouds_seen_from_below", (),
        "a step is convolutions, and a batch is there within a hundredth of it",
        batch=32, steps=20, warmup=4, tries={"workers": "2", "batch_size": "64"},
    ),
    Planted(
        "lightning_peptides_that_bind", (),
        "a step is products of matrices of 2048 rows",
        framework="lightning", batch=64, steps=16, warmup=4, tries={"workers": "2", "batch_size": "128"},
    ),
)  # fmt: skip
