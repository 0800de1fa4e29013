# /// cell
# cohort = "second"
# because = "The Trainer gathers the logits over the whole vocabulary of all evaluation batches (concatenating what it has again at each batch) only for an argmax in compute_metrics; preprocess_logits_for_metrics would keep the argmax alone."
# thread = "https://github.com/huggingface/transformers/issues/15466"
# line = "trainer.train()"
# callee = "transformers.Trainer.evaluate"
# faster = 1.48
# ///
import tempfile
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(13)


class Songs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 3000, (n, 1), generator=g)
        step = torch.randint(1, 4, (n, 1), generator=g)
        self.ids = (start + step * torch.arange(40)) % 3000

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def compute_metrics(p):
    guess = p.predictions.argmax(-1)
    return {"accuracy": float((guess[:, :-1] == p.label_ids[:, 1:]).mean())}


model = GPT2LMHeadModel(GPT2Config(vocab_size=3000, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=80, per_device_train_batch_size=8, per_device_eval_batch_size=8,
                         eval_strategy="steps", eval_steps=20, learning_rate=1e-3, logging_steps=20, save_strategy="no",
                         report_to="none", disable_tqdm=True, use_cpu=True)
trainer = Trainer(model=model, args=args, train_dataset=Songs(2000, 0), eval_dataset=Songs(200, 1), compute_metrics=compute_metrics)
# %% the training cell
trainer.train()
print(trainer.state.log_history[-2])
