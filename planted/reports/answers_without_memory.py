# /// cell
# because = "The rollouts are generated without the key/value cache (use_cache=False, left from training), so that every new token recomputes the whole sequence."
# thread = "https://github.com/meta-pytorch/torchtune/pull/2066"
# line = "model.config.use_cache = False"
# callee = "GenerationMixin.generate"
# faster = 2.73
# ///
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=160, n_embd=96, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=None, pad_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
prompts = torch.randint(1, 256, (200, 96))
NEW = 10
# %% the training cell
model.config.use_cache = False
for step in range(40):
    prompt = prompts[torch.randint(200, (4,))]
    with torch.no_grad():
        seq = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=True, use_cache=model.config.use_cache)
    answer = seq[:, -NEW:]
    reward = (answer % 2 == 0).float().mean(1)
    advantage = reward - reward.mean()
    logp = torch.log_softmax(model(seq, use_cache=False).logits[:, -NEW - 1:-1], -1)
    loss = -(logp.gather(2, answer[..., None]).squeeze(2).sum(1) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, reward.mean().item())
