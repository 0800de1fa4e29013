# /// cell
# causes = ["logging_or_eval"]
# because = "the edit distance of each name is found in Python in each step, and each sixtieth is logged"
# framework = "transformers"
# batch = 32
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = "report_every = 1\n"
# new = "report_every = 59\n"
# ///
"""How place names are pronounced: an encoder from letters to sounds; transformers' Trainer."""

import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments, set_seed

set_seed(417)
LETTERS, SOUNDS, LENGTH, SILENT = 30, 44, 48, 0


def gazetteer(count):
    """Each letter has a sound by its neighbour on the left; some keep silent."""
    names = torch.randint(1, LETTERS, (count, LENGTH))
    before = torch.cat([torch.zeros(count, 1, dtype=torch.long), names[:, :-1]], dim=1)
    sounds = 1 + (names + before % 2 * 13) % (SOUNDS - 1)
    sounds[names % 9 == 0] = SILENT
    return [{"input_ids": n, "labels": s} for n, s in zip(names, sounds, strict=True)]


class Pronouncer(nn.Module):
    def __init__(self, width=96, layers=1):
        super().__init__()
        self.encoder = BertModel(
            BertConfig(
                vocab_size=LETTERS,
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=layers,
                num_attention_heads=4,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        )
        self.head = nn.Linear(width, SOUNDS)

    def forward(self, input_ids, labels):
        scores = self.head(self.encoder(input_ids).last_hidden_state)
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def heard(sounds):
    return [s for s in sounds if s != SILENT]


def edits(found, right):
    """Levenshtein's distance; neighbours in the table of sounds are half as wrong."""
    row = [float(j) for j in range(len(right) + 1)]
    for i, f in enumerate(found, 1):
        corner, row[0] = row[0], float(i)
        for j, r in enumerate(right, 1):
            taken = 0.0 if f == r else 0.5 if abs(f - r) == 1 else 1.0
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + taken)
    return row[-1]


class PronunciationTrainer(Trainer):
    """The rate of wrong sounds stands beside the loss."""

    report_every = 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        if model.training and self.state.global_step % self.report_every == 0:
            self.wrong = self.sound_errors(outputs["logits"].detach(), inputs["labels"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def sound_errors(self, scores, labels):
        wrong = total = 0
        for said, label in zip(scores.argmax(-1).tolist(), labels.tolist(), strict=True):
            right = heard(label)
            wrong += edits(heard(said), right)
            total += len(right)
        return wrong / total

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            logs["sound_errors"] = self.wrong
        super().log(logs, *args, **kwargs)


# %% the training cell
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=180,
    per_device_train_batch_size=32,
    learning_rate=2e-3,
    warmup_steps=10,
    optim="adamw_torch_fused",
    logging_steps=60,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = PronunciationTrainer(model=Pronouncer(), args=args, train_dataset=gazetteer(2000))
trainer.train()
