"""Cells on feeding, written last, without a look at the rules, and kept aside."""

from __future__ import annotations

from benchmarks.planted.planted import Planted

LATEST_FEEDING: tuple[Planted, ...] = (
    Planted(
        "particles_in_thin_ice", ("storage_bound",),
        "nearly each particle's micrograph is waited for 3 ms in the process that trains, as few are kept",
        (("batch_size=16, shuffle=True", "batch_size=16, shuffle=True, num_workers=4, persistent_workers=True"),),
        batch=16, steps=30, warmup=6,
    ),
    Planted(
        "accelerate_signs_of_the_hand", ("storage_bound",),
        "one worker waits 3.5 ms for a clip's frames and as long for its sign, several steps' time for a batch",
        (("num_workers=1", "num_workers=4"),),
        framework="accelerate", batch=8, steps=36, warmup=12,
    ),
    Planted(
        "batteries_after_a_thousand_cycles", ("cpu_preprocessing",),
        "one worker smooths and interpolates the same charges anew in each epoch, for longer than a step takes",
        (
            (
                "        self.charges = charges\n",
                "        self.charges = charges\n"
                "        self.curves = [torch.from_numpy(dq_dv(c.volts, c.amp_hours)) for c in charges]\n",
            ),
            ("return torch.from_numpy(dq_dv(charge.volts, charge.amp_hours)), np", "return self.curves[i], np"),
        ),
        batch=32, steps=40, warmup=8,
    ),
    Planted(
        "lightning_functions_and_their_names", ("cpu_preprocessing",),
        "each function's source is cut into tokens in Python each time it is read",
        (
            ("        self.sources = sources\n", "        self.tokens = [encode(source) for source in sources]\n"),
            ("return len(self.sources)", "return len(self.tokens)"),
            ("return encode(self.sources[i]), ", "return self.tokens[i], "),
        ),
        framework="lightning", batch=32, steps=30, warmup=6,
    ),
    Planted(
        "taxis_at_rush_hour", ("cpu_preprocessing",),
        "a row is taken out of the data frame, its time parsed and its way worked out, trip by trip",
        (
            (
                "        self.df = df\n",
                "        self.df = df\n"
                '        called = pd.to_datetime(df["called_at"], format="%d.%m.%Y %H:%M").dt\n'
                "        x = self.features(called, *(df[name].to_numpy() for name in COLUMNS))\n"
                "        x = np.stack([np.asarray(column, dtype=np.float32) for column in x], axis=1)\n"
                "        self.x, self.zone = torch.from_numpy(x), torch.from_numpy(df.zone.to_numpy())\n"
                "        self.minutes = torch.from_numpy(df.minutes.to_numpy(dtype=np.float32))\n",
            ),
            ("float(passengers)]", "passengers]"),
            (
                "        row = self.df.iloc[idx]\n"
                '        called = datetime.strptime(row["called_at"], "%d.%m.%Y %H:%M")\n'
                "        x = self.features(called, *row[COLUMNS])\n"
                "        return torch.tensor(x, dtype=torch.float32), torch.tensor(row.zone), "
                "torch.tensor(row.minutes).float()\n",
                "        return self.x[idx], self.zone[idx], self.minutes[idx]\n",
            ),
            ("called.weekday()", "called.weekday"),
        ),
        batch=96, steps=30, warmup=6,
    ),
    Planted(
        "accelerate_power_grid_overloads", ("slow_collate",),
        "each line of each grid is written into the matrix of admittances by itself, twice",
        ((
            """        for (a, b), y in zip(s.lines.T.tolist(), s.susceptance.tolist(), strict=True):
            weights[k, a, b] += y
            weights[k, b, a] += y
""",
            """        there, back = s.lines, s.lines.flip(0)
        ends = torch.cat([there, back], 1)
        weights[k].index_put_((ends[0], ends[1]), s.susceptance.repeat(2), accumulate=True)
""",
        ),),
        framework="accelerate", batch=32, steps=36, warmup=6,
    ),
    Planted(
        "cattle_collars_at_pasture", ("slow_collate",),
        "strength, pitch and roll are worked out in Python for each reading of each stretch, and padded as lists",
        ((
            """        rows, last = [], sample["seconds"][0]
        for second, (x, y, z) in zip(sample["seconds"], sample["g"], strict=True):
            strength = math.sqrt(x * x + y * y + z * z)
            pitch = math.atan2(x, math.sqrt(y * y + z * z))
            roll = math.atan2(y, z)
            rows.append([x, y, z, strength - 1, pitch, roll, second - last])
            last = second
        masks.append([1.0] * len(rows) + [0.0] * (longest - len(rows)))
        while len(rows) < longest:
            rows.append([0.0] * 7)
        xs.append(rows)
    kinds = torch.tensor([sample["kind"] for sample in samples])
    return torch.tensor(xs, dtype=torch.float32).transpose(1, 2), torch.tensor(masks), kinds
""",
            """        seconds, (x, y, z) = sample["seconds"], sample["g"].T
        strength, pitch = np.sqrt(x * x + y * y + z * z), np.arctan2(x, np.hypot(y, z))
        since = np.diff(seconds, prepend=seconds[0])
        rows = np.zeros((7, longest), dtype=np.float32)
        rows[:, : len(x)] = np.stack([x, y, z, strength - 1, pitch, np.arctan2(y, z), since])
        masks.append(np.arange(longest) < len(x))
        xs.append(rows)
    kinds = torch.tensor([sample["kind"] for sample in samples])
    return torch.from_numpy(np.stack(xs)), torch.from_numpy(np.stack(masks)).float(), kinds
""",
        ),),
        batch=20, steps=40, warmup=8,
    ),
    Planted(
        "mushrooms_of_a_field_guide", ("worker_restart",),
        "both workers are started anew for each epoch of six steps",
        (("num_workers=2", "num_workers=2, persistent_workers=True"),),
        batch=16, steps=42, warmup=6,
    ),
    Planted(
        "lightning_glacier_fronts", (),
        "a step is convolutions, and the pictures lie in memory",
        framework="lightning", batch=16, steps=20, warmup=4, tries={"workers": "2", "batch_size": "32"},
    ),
    Planted(
        "bats_under_the_bridge", (),
        "a step is convolutions, and two workers are ahead of it with little work",
        batch=16, steps=20, warmup=8, tries={"workers": "4", "batch_size": "32"},
    ),
)  # fmt: skip
