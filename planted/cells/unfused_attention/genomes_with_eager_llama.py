# /// cell
# causes = ["unfused_attention"]
# because = "768 by 768 weights of each head go through memory again and again"
# framework = "transformers"
# steps = 12
# warmup = 3
# cohort = "2026-11-21d"
#
# [[cure]]
# old = 'attn_implementation="eager"'
# new = 'attn_implementation="sdpa"'
# ///
"""A small Llama reads genomes base by base; set to "eager" once, to draw the attention maps, and left so."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

torch.manual_seed(29)
LENGTH, BASES = 768, 6
repeats = torch.randint(1, 5, (128, 48)).repeat(1, LENGTH // 48)
genomes = torch.where(torch.rand(128, LENGTH) < 0.2, torch.randint(1, 5, (128, LENGTH)), repeats)
config = LlamaConfig(
    vocab_size=BASES,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    bos_token_id=0,
    eos_token_id=5,
    use_cache=False,
    attn_implementation="eager",
)
model = LlamaForCausalLM(config)


def batches(size):
    for rows in torch.randperm(len(genomes)).split(size):
        yield genomes[rows]


# %% the training cell
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=256)
for epoch in range(2):
    for ids in batches(1):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"epoch {epoch}: perplexity {loss.detach().exp():.2f}")
