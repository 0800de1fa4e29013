# /// cell
# causes = ["cpu_preprocessing"]
# because = "each function's source is cut into tokens in Python each time it is read"
# framework = "lightning"
# batch = 32
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "        self.sources = sources\n"
# new = '''
#         self.tokens = [encode(source) for source in sources]
# '''
#
# [[cure]]
# old = "return len(self.sources)"
# new = "return len(self.tokens)"
#
# [[cure]]
# old = "return encode(self.sources[i]), "
# new = "return self.tokens[i], "
# ///
"""A Lightning module guesses the first word of a function's name from its body, read with Python's own tokenizer."""

import io
import keyword
import random
import tokenize
import zlib

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pl.seed_everything(31, verbose=False)
VERBS = ["get", "set", "load", "parse", "count", "find", "merge", "drop"]
LENGTH, BUCKETS = 160, 4096
IGNORED = {tokenize.NL, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER}


def write_function(verb):
    """Source text such as one finds in a repository, more or less."""
    names = random.sample(["rows", "path", "cache", "items", "key", "line", "total", "node", "out"], 5)
    lines = [f"def {verb}_{names[0]}({names[1]}, {names[2]}=None):", f'    """{verb.title()}s the {names[0]}."""']
    for _ in range(random.randint(5, 8)):
        a, b = random.sample(names, 2)
        lines.append(
            random.choice(
                [
                    f"    {a} = [{b}[i] + {random.randint(0, 99)} for i in range(len({b})) if {b}[i] is not None]",
                    f"    if {a} not in {b} and not isinstance({a}, (int, str)):\n        raise ValueError('{b}')",
                    f"    {a}.{verb}({b}, default={random.random():.3f})  # as before",
                    f"    for {a} in sorted({b}, key=lambda k: (k.{a}, -k.size)):\n        {names[3]} += {a}['{b}']",
                ]
            )
        )
    return "\n".join([*lines, f"    return {names[4]}", ""])


def encode(source):
    ids, depth = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in IGNORED:
            continue
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        text = token.string
        if token.type == tokenize.NUMBER:
            text = "<number>"
        elif token.type == tokenize.STRING:
            text = "<string>"
        elif token.type == tokenize.NAME and not keyword.iskeyword(text) and len(ids) < 2:
            text = "<name>"  # what is to be guessed
        ids.append(1 + zlib.crc32(f"{min(depth, 3)}{text}".encode()) % (BUCKETS - 1))
    return torch.tensor((ids + [0] * LENGTH)[:LENGTH])


class Functions(Dataset):
    def __init__(self, sources, verbs):
        self.sources = sources
        self.verbs = verbs

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, i):
        return encode(self.sources[i]), self.verbs[i]


class Guesser(pl.LightningModule):
    def __init__(self, dim=64, channels=96):
        super().__init__()
        self.embed = nn.Embedding(BUCKETS, dim, padding_idx=0)
        self.ngrams = nn.ModuleList(nn.Conv1d(dim, channels, n, padding="same") for n in (3, 5))
        self.out = nn.Linear(2 * channels, len(VERBS))

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        return self.out(torch.cat([conv(x).amax(-1) for conv in self.ngrams], 1))

    def training_step(self, batch, _):
        tokens, verb = batch
        return nn.functional.cross_entropy(self(tokens), verb)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3, fused=True)


verbs = [random.randrange(len(VERBS)) for _ in range(1280)]
sources = [write_function(VERBS[verb]) for verb in verbs]

# %% the training cell
loader = DataLoader(Functions(sources, verbs), batch_size=32, shuffle=True)
pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(Guesser(), loader)
