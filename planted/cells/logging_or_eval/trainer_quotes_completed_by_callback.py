# /// cell
# causes = ["logging_or_eval"]
# because = "a callback lets the model write a line of text after every other step, letter by letter"
# framework = "transformers"
# batch = 8
# steps = 16
# warmup = 4
# cohort = "2026-11-23"
#
# [[cure]]
# old = "EVERY = 2"
# new = "EVERY = 500"
# ///
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

# Letters-only GPT-2 that finishes proverbs. For the school's open day (so people want to SEE it learn!)

EVERY = 2
PROVERBS = [
    "the early bird catches the worm",
    "a rolling stone gathers no moss",
    "too many cooks spoil the broth",
    "still waters run deep",
    "many hands make light work",
    "when the cat is away the mice will play",
    "better late than never",
    "every cloud has a silver lining",
]
ALPHABET = "\n abcdefghijklmnopqrstuvwxyz"

set_seed(99)


def to_ids(s):
    return [ALPHABET.index(ch) for ch in s]


class ProverbDataset(Dataset):
    def __init__(self, length=64, n=1600):
        order = torch.randint(len(PROVERBS), (n * 3,)).tolist()
        ids = torch.tensor(to_ids("\n".join(PROVERBS[i] for i in order)))
        self.chunks = ids[: len(ids) // length * length].view(-1, length)

    def __len__(self):
        return len(self.chunks)

    def __getitem__(self, i):
        return {"input_ids": self.chunks[i], "labels": self.chunks[i]}


class ShowOff(TrainerCallback):
    """Prints what the model makes of the beginning of a proverb."""

    def __init__(self, openings=("the ea",)):
        self.prompt = torch.tensor([to_ids(o) for o in openings])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                out = model.generate(self.prompt, max_new_tokens=40, do_sample=True, top_k=5, pad_token_id=0)
            model.train()
            for line in out:
                print(state.global_step, "".join(ALPHABET[i] for i in line))


config = GPT2Config(
    vocab_size=len(ALPHABET), n_positions=64, n_embd=96, n_layer=2, n_head=3,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
train_ds = ProverbDataset()

# %% the training cell
args = TrainingArguments(
    "proverbs",
    max_steps=120,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    warmup_steps=10,
    logging_steps=40,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    optim="adamw_torch_fused",
)
Trainer(GPT2LMHeadModel(config), args, train_dataset=train_ds, callbacks=[ShowOff()]).train()
