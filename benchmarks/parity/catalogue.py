"""The ten trainings: public code that runs unmodified, from checkouts that an environment variable names.

None of that code is here. Two kinds of library bring no training script that runs without a download; for them
`scripts` has one of the documented usage, with a tiny model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.parity import inputs

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True)
class Training:
    """One training script, how its own command line makes it small, and the data that it expects in its folder."""

    key: str
    title: str
    entry: str  # of the checkout
    arguments: tuple[str, ...] = ()
    repository: str = ""  # "owner/name" on GitHub; empty: a script of `scripts`
    commit: str = ""  # of the repository, with which it was tried
    folder: str = "."  # of the checkout: what is copied
    runs_in: str = "."  # of that folder: where the script is run
    cpu: tuple[str, ...] = ()  # further arguments without a GPU
    gpu: tuple[str, ...] = ()  # with one
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] = field(default=lambda folder: None)

    @property
    def checkout(self) -> str:
        """The folder's name among the checkouts."""
        return self.repository.rpartition("/")[2]


_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")

TRAININGS: tuple[Training, ...] = (
    Training(
        key="nanogpt",
        title="nanoGPT, train.py",
        repository="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        entry="train.py",
        arguments=(  # as its README has it for a laptop, smaller still
            "config/train_shakespeare_char.py",
            "--compile=False",
            "--eval_iters=1",
            "--block_size=64",
            "--batch_size=12",
            "--n_layer=4",
            "--n_head=4",
            "--n_embd=64",
            "--max_iters=400",
            "--lr_decay_iters=400",
            "--dropout=0.0",
        ),
        cpu=("--device=cpu",),
        gpu=("--device=cuda",),
        prepare=inputs.shakespeare_char,
    ),
    Training(
        key="mingpt",
        title="minGPT, chargpt.py",
        repository="karpathy/minGPT",
        commit="37baab71b9abea1b76ab957409a1cc2fbfba8a26",
        entry="projects/chargpt/chargpt.py",
        arguments=(
            "--model.model_type=gpt-nano",
            "--data.block_size=64",
            "--trainer.batch_size=16",
            "--trainer.max_iters=400",
        ),
        prepare=inputs.one_text,
    ),
    Training(
        key="word_language_model",
        title="pytorch/examples, word_language_model",
        repository=_EXAMPLES[0],
        commit=_EXAMPLES[1],
        folder="word_language_model",
        entry="main.py",
        arguments=(
            "--data=words",
            "--emsize=64",
            "--nhid=64",
            "--use-optimizer",
            "--lr=0.001",
            "--epochs=3",
        ),
        gpu=("--accel",),
        prepare=inputs.words,
    ),
    Training(
        key="time_sequence",
        title="pytorch/examples, time_sequence_prediction",
        repository=_EXAMPLES[0],
        commit=_EXAMPLES[1],
        folder="time_sequence_prediction",
        entry="train.py",
        arguments=("--steps=60",),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},  # it loads NumPy arrays with torch.load
        prepare=inputs.sine_waves,
    ),
    Training(key="trainer_causal", title="Hugging Face's Trainer, a causal model", entry="trainer_causal.py"),
    Training(key="trainer_classifier", title="Hugging Face's Trainer, a classifier", entry="trainer_classifier.py"),
    Training(key="lightning_slow", title="Lightning on a slow dataset", entry="lightning_slow.py"),
    Training(
        key="dlrm",
        title="a recommender: DLRM",
        repository="facebookresearch/dlrm",
        commit="090956ee2319ddd349a42232958aefccfe3f7b0a",
        entry="dlrm_s_pytorch.py",
        arguments=(  # as its README and its tests call it, on data of random numbers
            "--arch-sparse-feature-size=16",
            "--arch-embedding-size=1000-1000-1000-1000-1000-1000-1000-1000",
            "--arch-mlp-bot=13-64-16",
            "--arch-mlp-top=64-1",
            "--mini-batch-size=128",
            "--num-batches=400",
            "--num-indices-per-lookup=4",
            "--num-indices-per-lookup-fixed=True",
            "--print-freq=100",
        ),
        gpu=("--use-gpu",),
    ),
    Training(
        key="gcn",
        title="a graph network: pygcn",
        repository="tkipf/pygcn",
        commit="1600b5b748b3976413d1e307540ccc62605b4d6d",
        entry="pygcn/train.py",
        runs_in="pygcn",
        arguments=("--hidden=64", "--epochs=400"),
        prepare=inputs.citations,
    ),
    Training(
        key="diffusion",
        title="a diffusion model: tiny-diffusion",
        repository="tanelp/tiny-diffusion",
        commit="726b6bbbf2c9e3d23dff9eaea2fda10d0af6a78c",
        entry="ddpm.py",
        arguments=("--dataset=moons", "--num_epochs=3"),
    ),
)


def named(key: str) -> Training:
    """Raises KeyError for a key that no training has."""
    return {training.key: training for training in TRAININGS}[key]
