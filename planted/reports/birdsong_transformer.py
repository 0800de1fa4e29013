# /// cell
# cohort = "third"
# because = "Without torchaudio ASTFeatureExtractor falls back to the numpy spectrogram, a Python loop over the frames of each clip, on every batch; compute the filter banks of the whole batch with torch (or install torchaudio)."
# thread = "https://github.com/huggingface/transformers/pull/26339"
# line = "features = extractor(list(waves.numpy()), sampling_rate=16000, return_tensors=\"pt\").input_values"
# callee = "transformers.ASTFeatureExtractor.__call__"
# faster = 2.00
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification

torch.manual_seed(0)
SECONDS, KINDS = 16000, 5
time = torch.arange(2 * SECONDS) / SECONDS


def song(kind):
    trill = torch.sin(2 * torch.pi * (4 + 2 * kind) * time + 6 * torch.rand(1))
    pitch = 1500 + 500 * kind + 300 * trill
    return torch.sin(2 * torch.pi * torch.cumsum(pitch / SECONDS, 0)) * (0.5 + 0.5 * trill)


kinds = torch.arange(100) % KINDS
songs = torch.stack([song(k.item()) for k in kinds])
extractor = ASTFeatureExtractor(num_mel_bins=64, max_length=96)
config = ASTConfig(hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192,
                   num_mel_bins=64, max_length=96, num_labels=KINDS)
model = ASTForAudioClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)


def draw(size):
    rows = torch.randint(len(songs), (size,))
    start = torch.randint(SECONDS, (size,)).tolist()
    waves = torch.stack([songs[r, s:s + SECONDS] for r, s in zip(rows.tolist(), start)])
    return waves + 0.3 * torch.rand(size, 1) * torch.randn_like(waves), kinds[rows]


# %% the training cell
for step in range(60):
    waves, labels = draw(12)
    features = extractor(list(waves.numpy()), sampling_rate=16000, return_tensors="pt").input_values
    loss = F.cross_entropy(model(features).logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
print("last", loss.item())
