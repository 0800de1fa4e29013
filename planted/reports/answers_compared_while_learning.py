# /// cell
# cohort = "second"
# because = "The evaluation in the training generates the answers one prompt at a time; all prompts of equal length can be generated in one batch."
# thread = "https://github.com/agorevski/A1.5_Smart_Contract_Bytecode_To_Code_Generator/issues/58"
# line = "out = model.generate(prompts[i:i + 1], max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)"
# callee = "GPT2LMHeadModel.generate"
# faster = 2.09
# ///
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(23)
LENGTH = 10


def make(n):
    a = torch.randint(2, 30, (n, LENGTH))
    return torch.cat([a, torch.ones(n, 1, dtype=torch.long), a.flip(1)], 1)


train, val = make(3000), make(24)
config = GPT2Config(vocab_size=32, n_positions=32, n_embd=96, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def exact_match(model, data):
    model.eval()
    prompts, answers = data[:, :LENGTH + 1], data[:, LENGTH + 1:]
    hits = 0.0
    with torch.no_grad():
        for i in range(len(prompts)):
            out = model.generate(prompts[i:i + 1], max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
            guess = out[0, LENGTH + 1:]
            hits += (guess == answers[i][:len(guess)]).float().mean().item()
    model.train()
    return hits / len(prompts)


# %% the training cell
model.train()
for step in range(1, 81):
    batch = train[torch.randint(0, len(train), (16,))]
    labels = batch.clone()
    labels[:, :LENGTH + 1] = -100
    loss = model(input_ids=batch, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(step, loss.item(), exact_match(model, val))
