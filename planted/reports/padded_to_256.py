# /// cell
# because = "All texts are padded to the longest length the model supports (256) though they have 10 to 60 tokens; padding to the longest of the batch is enough."
# thread = "https://github.com/QData/TextAttack/issues/737"
# line = "width = MAX_LENGTH"
# callee = "pad_batch (then BertModel.forward over padding)"
# faster = 5.61
# ///
import random
import torch
from transformers import BertConfig, BertForSequenceClassification

random.seed(0); torch.manual_seed(0)
MAX_LENGTH = 256
config = BertConfig(vocab_size=3000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, max_position_embeddings=MAX_LENGTH, num_labels=2)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
texts = [([random.randrange(4, 1500 + 1500 * (k % 2)) for _ in range(random.randint(10, 60))], k % 2) for k in range(1500)]


def pad_batch(items):
    width = MAX_LENGTH
    ids = torch.zeros(len(items), width, dtype=torch.long)
    mask = torch.zeros(len(items), width, dtype=torch.long)
    for row, (tokens, _) in enumerate(items):
        ids[row, :len(tokens)] = torch.tensor(tokens)
        mask[row, :len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in items])}
# %% the training cell
model.train()
random.shuffle(texts)
for step in range(45):
    batch = pad_batch(texts[8 * step:8 * step + 8])
    out = model(**batch)
    optimizer.zero_grad()
    out.loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(step, out.loss.item())
