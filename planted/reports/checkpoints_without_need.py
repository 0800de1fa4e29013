# /// cell
# because = "Gradient checkpointing is enabled though memory is no constraint: every block's forward is computed a second time in backward."
# thread = "https://github.com/Nerogar/OneTrainer/issues/40"
# line = "model.gradient_checkpointing_enable()"
# callee = "torch.utils.checkpoint.checkpoint"
# faster = 1.48
# ///
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=128, n_positions=128, n_embd=128, n_layer=5, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
corpus = torch.randint(0, 128, (60_000,))
# %% the training cell
model.train()
model.gradient_checkpointing_enable()
for step in range(40):
    starts = torch.randint(len(corpus) - 128, (4,))
    batch = torch.stack([corpus[s:s + 128] for s in starts])
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
